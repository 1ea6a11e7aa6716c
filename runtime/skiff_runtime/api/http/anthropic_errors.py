"""Errors in the shape of Anthropic's API, and the paths that answer in this shape.

``overloaded_error`` has the status 503 here, not Anthropic's 529: load balancers and ingress controllers know 503 and its
Retry-After, and Anthropic's clients retry both (docs/decisions/0028-messages-api.md).
"""

from typing import Final

from skiff_runtime import contract
from skiff_runtime.errors import ErrorFields
from skiff_runtime.sse import encode_json

ANTHROPIC_PATHS: Final = frozenset({contract.PATH_MESSAGES, contract.PATH_COUNT_TOKENS})

_TYPES: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By HTTP status; every other status below 500 is ``invalid_request_error``, and above ``api_error``."""


_UNSUPPORTED_THREAD: Final = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""``error.details`` that makes Anthropic's tool runner retry without a stored thread."""


def anthropic_error(error: ErrorFields, request_id: str) -> dict[str, object]:
    """Return ``{"type": "error", "error": {"type", "message"}, "request_id"}``; the refusal of a thread has ``details``."""
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    fields: dict[str, object] = {"type": kind, "message": error.message}
    if error.param == "thread":
        fields["details"] = _UNSUPPORTED_THREAD
    return {"type": "error", "error": fields, "request_id": request_id}


def anthropic_error_body(error: ErrorFields, request_id: str) -> bytes:
    """Return an error as the JSON body of a response."""
    return encode_json(anthropic_error(error, request_id))
