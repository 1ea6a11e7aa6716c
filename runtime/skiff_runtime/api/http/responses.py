"""One whole response, sent at once, with what every response to a request carries."""

from typing import Final

from skiff_runtime.api.error_replies import error_body, error_headers
from skiff_runtime.api.http.asgi import Headers, Send
from skiff_runtime.api.http.request_body import REQUEST_ID_HEADER, Scope, request_id
from skiff_runtime.errors import RequestError

JSON: Final = "application/json"
_OWN: Final = "skiff.headers"


def begin(scope: Scope) -> Headers:
    """Give a request its id; the list of headers that its response will carry, to be added to."""
    own: Headers = [(REQUEST_ID_HEADER, request_id(scope["headers"]).encode())]
    scope[_OWN] = own
    return own


def get_response_headers(scope: Scope) -> Headers:
    """What every response to this request carries: its id first, then what a page of another origin needs."""
    own: Headers = scope[_OWN]
    return own


def get_request_id(scope: Scope) -> str:
    """The request's id."""
    return get_response_headers(scope)[0][1].decode()


async def reply(
    scope: Scope,
    send: Send,
    status: int,
    body: bytes,
    content_type: str = JSON,
    *,
    extra: Headers | None = None,
) -> None:
    """Send a whole response."""
    headers = [
        (b"content-type", content_type.encode()),
        (b"content-length", str(len(body)).encode()),
        *get_response_headers(scope),
        *(extra or ()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_error(scope: Scope, send: Send, error: RequestError) -> None:
    """Send an error as a whole response."""
    await reply(scope, send, error.status, error_body(error), extra=error_headers(error))
