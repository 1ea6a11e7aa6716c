"""Exception handlers of FastAPI's path operations: errors become responses in the shape of their path."""

from collections.abc import Callable
from typing import Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from skiff_runtime import contract
from skiff_runtime.api.http.responses import JSON, error_body_for, error_headers
from skiff_runtime.errors import UNEXPECTED_ERROR, InternalError, InvalidRequest, RequestError

_GENERATION_PATHS: Final = ", ".join(
    (
        contract.PATH_CHAT_COMPLETIONS,
        contract.PATH_RESPONSES,
        contract.PATH_COMPLETIONS,
        contract.PATH_MESSAGES,
        contract.PATH_GENERATE,
    )
)
_POOLING_PATHS: Final = ", ".join((contract.PATH_EMBEDDINGS, contract.PATH_RERANK, contract.PATH_SCORE))
_MAX_SHOWN_CHARACTERS: Final = 200
_FAILURES: Final = (500, 504)
"""Statuses of accepted requests that failed, which are not rejections."""


def add_exception_handlers(app: FastAPI, on_rejected: Callable[[int], None]) -> None:
    """Turn each error into a response. ``on_rejected`` is called with the status of each rejected request."""

    async def handle_request_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        if error.status not in _FAILURES:
            on_rejected(error.status)
        return _make_response(request, error, error.status)

    async def handle_validation_error(request: Request, error: Exception) -> Response:
        """Handle the only error that FastAPI itself finds: ``JsonBody`` raises ``InvalidRequest`` for all others."""
        assert isinstance(error, RequestValidationError)
        on_rejected(400)
        return _make_response(request, InvalidRequest("the request body is not valid JSON: it is empty"), 400)

    async def handle_http_exception(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        on_rejected(error.status_code)
        path = request.url.path[:_MAX_SHOWN_CHARACTERS]
        if error.status_code == 404:
            return _make_response(
                request,
                InvalidRequest(
                    f"there is no {path}: this server generates text, at {_GENERATION_PATHS}, and computes embeddings "
                    f"and scores of texts, at {_POOLING_PATHS}; "
                    f"GET {contract.PATH_DOCS} lists every path",
                    code="not_found",
                ),
                404,
            )
        allowed = _allowed_methods(error)
        response = _make_response(
            request,
            InvalidRequest(
                f"{path} does not support {request.method}; use {allowed}", code="method_not_allowed"
            ),
            error.status_code,
        )
        response.headers["allow"] = allowed
        return response

    async def handle_exception(request: Request, _error: Exception) -> Response:
        """Hide the details from the client. Starlette raises the error again, and the server logs it."""
        return _make_response(request, InternalError(UNEXPECTED_ERROR), 500)

    app.add_exception_handler(RequestError, handle_request_error)
    app.add_exception_handler(RequestValidationError, handle_validation_error)
    app.add_exception_handler(HTTPException, handle_http_exception)
    app.add_exception_handler(Exception, handle_exception)


def _allowed_methods(error: HTTPException) -> str:
    """Return the methods that a path allows: HEAD too wherever GET is allowed."""
    methods = (error.headers or {}).get("Allow", "another method")
    return "GET, HEAD" if methods == "GET" else methods


def _make_response(request: Request, error: RequestError, status: int) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(
        error_body_for(request.scope, error), status_code=status, media_type=JSON, headers=headers
    )
