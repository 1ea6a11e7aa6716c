"""Parts of the OpenAPI document that many path operations share: responses, headers, the API key."""

import asyncio
from typing import Annotated, Any, Final

from fastapi import FastAPI, Header
from fastapi.security import HTTPBearer
from pydantic import BaseModel

from skiff_runtime import contract
from skiff_runtime.api.http.asgi import Receive, Scope, Send
from skiff_runtime.api.http.request_headers import REQUEST_ID_HEADER
from skiff_runtime.api.schemas.error_bodies import ErrorResponse

Responses = dict[int | str, dict[str, Any]]

_REASONS: Final = {
    400: "The request is malformed, or cannot be served.",
    401: "The API key is missing or unknown.",
    403: "A page of another origin sent this to a server without keys, or an admin key is required.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests are waiting; Retry-After is the number of seconds to wait.",
    500: "The service failed.",
    503: "The service is starting, shutting down or restarting; Retry-After is the number of seconds to wait.",
    504: "The request's deadline passed, and its abort was not confirmed in time.",
}
REQUEST_ID_RESPONSE_HEADER: Final = {
    REQUEST_ID_HEADER.decode(): {"description": "The request's ID.", "schema": {"type": "string"}}
}
_RETRY_AFTER: Final = {"retry-after": {"description": "Seconds.", "schema": {"type": "string"}}}
DEFAULT_RESPONSES: Final[Responses] = {
    200: {"description": "Success.", "headers": REQUEST_ID_RESPONSE_HEADER},
    "default": {
        "model": ErrorResponse,
        "description": "Any other error.",
        "headers": REQUEST_ID_RESPONSE_HEADER,
    },
}
"""Responses of every path operation."""


def schema_reference(model: type[BaseModel]) -> dict[str, str]:
    """Return a reference to the schema of a model that is among the document's components."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}


bearer_key = HTTPBearer(scheme_name="key", description="One of the service's API keys.", auto_error=False)
"""Documents the API key. The access middleware has checked it already."""


def error_responses(*statuses: int, error: type[BaseModel] = ErrorResponse) -> Responses:
    """Return the documentation of error responses in the shape ``error``, which must be among the components.

    It is a reference, because FastAPI builds a validator for each ``model`` of each operation: 1 MiB for all of them.
    """
    return {
        status: {
            "content": {"application/json": {"schema": schema_reference(error)}},
            "description": _REASONS[status],
            "headers": {**REQUEST_ID_RESPONSE_HEADER, **(_RETRY_AFTER if status in (429, 503) else {})},
        }
        for status in statuses
    }


def not_ready_response(model: type[BaseModel]) -> Responses:
    """Return the documentation of a probe's 503, whose body is the probe's own."""
    return {503: {"model": model, "description": "The probe fails.", "headers": REQUEST_ID_RESPONSE_HEADER}}


def text_response(*media_types: str) -> Responses:
    """Return the documentation of a success whose body is text, for a path operation with the class ``Response``."""
    content = {kind: {"schema": {"type": "string"}} for kind in media_types}
    return {200: {"content": content, **DEFAULT_RESPONSES[200]}}


async def document_request_id(
    x_request_id: Annotated[
        str,
        Header(
            description="An ID of the client's choice, of up to 128 letters, digits and ._:/=+-; any other value is "
            "replaced by a new ID."
        ),
    ] = "",
) -> None:
    """Document the header, which the access middleware has read already."""


class OpenApiMiddleware:
    """Builds the OpenAPI document on a thread when it is first requested.

    FastAPI would build it on the event loop, where it blocks every stream for 0.14 s. Built at startup it would cost
    that time and 4.5 MiB in every service, although few services are ever asked for it.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._building = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["path"] == contract.PATH_OPENAPI:
            async with self._building:
                if self._app.openapi_schema is None:
                    await asyncio.to_thread(self._app.openapi)
        await self._app(scope, receive, send)
