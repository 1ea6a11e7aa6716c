"""Request headers that every endpoint reads: the request ID, the deadline and the trace context."""

import re
import secrets
from typing import Final

from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.errors import InvalidRequest

MAX_DEADLINE_SECONDS: Final = 86400
REQUEST_ID_HEADER: Final = b"x-request-id"
TIMEOUT_HEADER: Final = b"x-request-timeout-seconds"
_ID_DIGITS: Final = 24
_IDS_READ_AT_ONCE: Final = 256
_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")


def get_header(headers: Headers, name: bytes) -> bytes:
    """Return the value of the first header called ``name`` (in lower case), or b"" if there is none."""
    for each, value in headers:
        if each == name:
            return value
    return b""


def choose_request_id(headers: Headers) -> str:
    """Return the client's X-Request-Id if it is a short plain word, else a new ID of 24 hexadecimal digits."""
    for name, value in headers:
        if name == REQUEST_ID_HEADER and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return _new_request_id()


class _RandomIds:
    """New IDs of 24 hexadecimal digits; the random bytes of many are read by one system call."""

    def __init__(self) -> None:
        self._digits = ""
        self._used = 0

    def __call__(self) -> str:
        if self._used == len(self._digits):
            self._digits, self._used = secrets.token_hex(_ID_DIGITS // 2 * _IDS_READ_AT_ONCE), 0
        first = self._used
        self._used += _ID_DIGITS
        return self._digits[first : self._used]


_new_request_id: Final = _RandomIds()


def parse_deadline(headers: Headers, max_seconds: float) -> float:
    """Return the smaller of the client's X-Request-Timeout-Seconds and ``max_seconds``; 0 means no deadline.

    Raises:
        InvalidRequest: The header is not a number of seconds above 0 and at most ``MAX_DEADLINE_SECONDS``.
    """
    for name, value in headers:
        if name == TIMEOUT_HEADER:
            try:
                seconds = float(value)
            except ValueError:
                seconds = 0.0
            if not 0 < seconds <= MAX_DEADLINE_SECONDS:
                raise InvalidRequest(
                    f"the header {TIMEOUT_HEADER.decode()} must be a number of seconds above 0 and at most "
                    f"{MAX_DEADLINE_SECONDS}",
                    param=TIMEOUT_HEADER.decode(),
                )
            return min(seconds, max_seconds or seconds)
    return max_seconds


def get_trace_context(headers: Headers) -> dict[str, str]:
    """Return the W3C trace context headers, by name."""
    return {
        name.decode(): value.decode("latin-1")
        for name, value in headers
        if name in (b"traceparent", b"tracestate")
    }
