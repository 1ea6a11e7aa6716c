"""Errors in OpenAI's shape."""

from http import HTTPStatus
from typing import Final

from pydantic import BaseModel

from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.errors import RequestError
from skiff_runtime.messages import RequestFailed
from skiff_runtime.sse import encode_json

_RETRY: Final = (429, 503)
_CLOSING: Final = (401, 403, 408, 413)


class ErrorDetail(BaseModel):
    """The fault, and the change that mends it."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every error, in OpenAI's shape."""

    error: ErrorDetail


def error_body(error: RequestError | RequestFailed) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}``."""
    fields = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return encode_json({"error": fields})


def error_headers(error: RequestError | RequestFailed) -> Headers:
    """What the status asks for: when to retry, which key is wanted; a body that was refused unread ends its connection."""
    headers: Headers = []
    if error.status in _RETRY:
        headers.append((b"retry-after", str(max(1, error.retry_after_seconds)).encode()))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    if error.status in _CLOSING:
        headers.append((b"connection", b"close"))
    return headers


def render_error_response(error: RequestError, own: Headers, *, with_body: bool) -> bytes:
    """Write an error as a whole HTTP reply that ends its connection; ``own`` are headers of every reply."""
    body = error_body(error)
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        *(header for header in error_headers(error) if header[0] != b"connection"),
        *own,
        (b"connection", b"close"),
    ]
    status = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()
    head = status + b"".join(b"%b: %b\r\n" % header for header in headers) + b"\r\n"
    return head + body if with_body else head
