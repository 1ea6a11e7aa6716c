"""Whole responses, errors in the shape of their path, and the headers that every response to a request carries."""

from http import HTTPStatus
from typing import Final

from skiff_runtime.api.http.anthropic_errors import ANTHROPIC_PATHS, anthropic_error_body
from skiff_runtime.api.http.asgi import Headers, Scope, Send
from skiff_runtime.api.http.request_headers import REQUEST_ID_HEADER, choose_request_id
from skiff_runtime.errors import ErrorFields, RequestError
from skiff_runtime.sse import encode_json

JSON: Final = "application/json"
ANTHROPIC_REQUEST_ID_HEADER: Final = b"request-id"
"""The header in which Anthropic's clients look for the ID."""
_SCOPE_KEY: Final = "skiff.headers"
_WITH_RETRY_AFTER: Final = (429, 503)
_CLOSING: Final = (401, 403, 408, 413)
"""Statuses of requests that may be rejected before their body was read."""


def begin_response(scope: Scope) -> Headers:
    """Give a request its ID. Return the list of headers that its response will carry, for the caller to extend."""
    request_id = choose_request_id(scope["headers"]).encode()
    headers: Headers = [(REQUEST_ID_HEADER, request_id)]
    if scope["path"] in ANTHROPIC_PATHS:
        headers.append((ANTHROPIC_REQUEST_ID_HEADER, request_id))
    scope[_SCOPE_KEY] = headers
    return headers


def get_response_headers(scope: Scope) -> Headers:
    """Return the headers that every response to this request carries: its ID first, then CORS headers."""
    headers: Headers = scope[_SCOPE_KEY]
    return headers


def get_request_id(scope: Scope) -> str:
    """Return the ID of a request."""
    return get_response_headers(scope)[0][1].decode()


async def send_response(
    scope: Scope,
    send: Send,
    status: int,
    body: bytes,
    content_type: str = JSON,
    *,
    extra: Headers | None = None,
) -> None:
    """Send a whole response, with the headers ``extra`` beside those that every response carries."""
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
    await send_response(scope, send, error.status, error_body_for(scope, error), extra=error_headers(error))


def error_body_for(scope: Scope, error: RequestError) -> bytes:
    """Return the body of an error in the shape of the request's path."""
    if scope["path"] in ANTHROPIC_PATHS:
        return anthropic_error_body(error, get_request_id(scope))
    return error_body(error)


def error_body(error: ErrorFields) -> bytes:
    """Return ``{"error": {"message", "type", "param", "code"}}``."""
    fields = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return encode_json({"error": fields})


def error_headers(error: ErrorFields) -> Headers:
    """Return the headers that a status requires: Retry-After, WWW-Authenticate, and Connection.

    Where the body may be unread the connection ends, because its bytes would be taken for the next request.
    """
    headers: Headers = []
    if error.status in _WITH_RETRY_AFTER:
        headers.append((b"retry-after", str(max(1, error.retry_after_seconds)).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status in _CLOSING:
        headers.append((b"connection", b"close"))
    return headers


def render_error_response(error: RequestError, headers: Headers, *, with_body: bool) -> bytes:
    """Return an error as the bytes of a whole HTTP response that ends its connection, with ``headers`` added."""
    body = error_body(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *(header for header in error_headers(error) if header[0] != b"connection"),
        *headers,
        (b"connection", b"close"),
    ]
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
    head = status + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"
    return head + body if with_body else head
