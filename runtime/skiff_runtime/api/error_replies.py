"""Errors in OpenAI's shape."""

from typing import Final

from skiff_runtime.api.sse import encode_json
from skiff_runtime.errors import RequestError
from skiff_runtime.messages import RequestFailed

RETRY_AFTER_SECONDS: Final = 1
_RETRY: Final = (429, 503)


def error_body(error: RequestError | RequestFailed) -> bytes:
    """``{"error": {"message", "type", "param", "code"}}``."""
    fields = {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}
    return encode_json({"error": fields})


def error_headers(status: int) -> list[tuple[bytes, bytes]]:
    """When to retry, where that may help; a refused body is not read on, so its connection ends."""
    if status in _RETRY:
        return [(b"retry-after", str(RETRY_AFTER_SECONDS).encode())]
    return [(b"connection", b"close")] if status == 413 else []
