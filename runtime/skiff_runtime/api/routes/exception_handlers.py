"""Errors of FastAPI's path operations, as replies in OpenAI's shape."""

from collections.abc import Callable
from typing import Final

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from skiff_runtime import contract
from skiff_runtime.api.error_replies import error_body, error_headers
from skiff_runtime.api.http.responses import JSON
from skiff_runtime.errors import InternalError, InvalidRequest, RequestError

_GENERATION_PATHS: Final = ", ".join(
    (contract.PATH_CHAT_COMPLETIONS, contract.PATH_COMPLETIONS, contract.PATH_GENERATE)
)
_MAX_SHOWN_CHARACTERS: Final = 200
_FAULTS: Final = (500, 504)
"""Statuses of requests that failed, which is no refusal."""


def add_exception_handlers(app: FastAPI, on_refused: Callable[[int], None]) -> None:
    """Make each error a reply. ``on_refused`` is called with the status of each request that is refused."""

    async def refused(_request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        if error.status not in _FAULTS:
            on_refused(error.status)
        return _reply(error, error.status)

    async def no_body(_request: Request, error: Exception) -> Response:
        """The one fault that FastAPI finds itself: ``JsonBody`` raises ``InvalidRequest`` for all others."""
        assert isinstance(error, RequestValidationError)
        on_refused(400)
        return _reply(InvalidRequest("the request body is no valid JSON: it is empty"), 400)

    async def not_served(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        on_refused(error.status_code)
        path = request.url.path[:_MAX_SHOWN_CHARACTERS]
        if error.status_code == 404:
            return _reply(
                InvalidRequest(
                    f"there is no {path}: this server generates text only, at {_GENERATION_PATHS}; "
                    f"GET {contract.PATH_DOCS} lists every path",
                    code="not_found",
                ),
                404,
            )
        allowed = _allowed(error)
        response = _reply(
            InvalidRequest(
                f"{path} does not take {request.method}; use {allowed}", code="method_not_allowed"
            ),
            error.status_code,
        )
        response.headers["allow"] = allowed
        return response

    async def broken(_request: Request, _error: Exception) -> Response:
        """The client learns that the fault is ours; the server logs the rest."""
        return _reply(InternalError("an internal error; the server's log has the details"), 500)

    app.add_exception_handler(RequestError, refused)
    app.add_exception_handler(RequestValidationError, no_body)
    app.add_exception_handler(HTTPException, not_served)
    app.add_exception_handler(Exception, broken)


def _allowed(error: HTTPException) -> str:
    """Return the methods that a path takes: HEAD wherever GET is one."""
    methods = (error.headers or {}).get("Allow", "another method")
    return "GET, HEAD" if methods == "GET" else methods


def _reply(error: RequestError, status: int) -> Response:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_body(error), status_code=status, media_type=JSON, headers=headers)
