"""Parts of the OpenAPI document that many path operations share: responses, headers, the API key."""

from typing import Annotated, Any, Final

from fastapi import Header
from fastapi.security import HTTPBearer
from pydantic import BaseModel

from skiff_runtime.api.error_replies import ErrorResponse
from skiff_runtime.api.http.request_body import REQUEST_ID_HEADER

Responses = dict[int | str, dict[str, Any]]

_REASONS: Final = {
    400: "The request is malformed, or asks for something that cannot be done.",
    401: "A key is missing, or not known.",
    403: "A page of another origin may not send this where no keys are wanted, or an admin key is needed.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    429: "Too many requests wait already; Retry-After is the number of seconds to wait.",
    500: "The service failed.",
    503: "The service starts, shuts down or restarts; Retry-After is the number of seconds to wait.",
    504: "The request's deadline passed, and its end was not confirmed in time.",
}
ID_HEADER: Final = {
    REQUEST_ID_HEADER.decode(): {"description": "The request's id.", "schema": {"type": "string"}}
}
_RETRY_HEADER: Final = {"retry-after": {"description": "Seconds.", "schema": {"type": "string"}}}
DEFAULT_RESPONSES: Final[Responses] = {
    200: {"description": "Success.", "headers": ID_HEADER},
    "default": {"model": ErrorResponse, "description": "Any other error.", "headers": ID_HEADER},
}
"""Of every path operation."""
_ERROR_CONTENT: Final = {
    "application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorResponse.__name__}"}}
}
"""By reference: FastAPI builds a validator for each ``model`` of each operation, 1 MiB for all of them."""

bearer_key = HTTPBearer(scheme_name="key", description="One of the service's API keys.", auto_error=False)
"""Documents the key. The gate has checked it already."""


def failures(*statuses: int) -> Responses:
    """Error responses in OpenAI's shape."""
    return {
        status: {
            "content": _ERROR_CONTENT,
            "description": _REASONS[status],
            "headers": {**ID_HEADER, **(_RETRY_HEADER if status in (429, 503) else {})},
        }
        for status in statuses
    }


def unready(model: type[BaseModel]) -> Responses:
    """The 503 of a probe, which has the probe's own reply."""
    return {503: {"model": model, "description": "Not so.", "headers": ID_HEADER}}


def text(*media_types: str) -> Responses:
    """A success whose body is text, of a path operation with the class ``Response``."""
    content = {kind: {"schema": {"type": "string"}} for kind in media_types}
    return {200: {"content": content, **DEFAULT_RESPONSES[200]}}


async def request_id_header(
    x_request_id: Annotated[
        str,
        Header(
            description="An id of the client's own, of up to 128 letters, digits and ._:/=+-; any other is "
            "replaced by a new one."
        ),
    ] = "",
) -> None:
    """Document the header, which the gate has read already."""
