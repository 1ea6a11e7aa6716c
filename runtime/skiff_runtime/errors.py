"""The tree of exceptions, and the form in which clients see them.

``RequestError`` and its subclasses carry the fields of OpenAI's error object. Every other error is internal:
at a process boundary it becomes an exit code or a 500.
"""

from typing import Final, Protocol

CLIENT_CLOSED_REQUEST: Final = 499
"""The HTTP status that nginx logs for a client that disconnected before the response."""


class SkiffError(Exception):
    """Base class of every error that Skiff raises deliberately."""


class ConfigError(SkiffError):
    """A flag, environment variable or model directory is invalid. The message says what to change."""


class ModelError(ConfigError):
    """A model's files are missing, malformed or of an architecture that is not supported."""


class FetchError(SkiffError):
    """A model could not be downloaded."""


class StartupError(SkiffError):
    """A process did not become ready in time, or died before it did."""


class CollectiveTimeout(SkiffError):
    """A rank waited for another one in a collective for longer than it may."""


class RequestError(SkiffError):
    """An error of one request, which affects no other request.

    ``status``: the HTTP status; ``kind``: OpenAI's ``error.type``; ``param``: the invalid field; ``code``: a
    stable word that programs may test. ``retry_after_seconds``: the delay after which a retry may succeed; 0
    if no delay helps.
    """

    status: int = 400
    kind: str = "invalid_request_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.param = param
        if code is not None:
            self.code = code


class ErrorFields(Protocol):
    """The fields of an error that a response shows: a ``RequestError``, or the message ``RequestFailed`` of a process."""

    @property
    def status(self) -> int:
        """Return the HTTP status."""
        ...

    @property
    def kind(self) -> str:
        """Return OpenAI's ``error.type``."""
        ...

    @property
    def message(self) -> str:
        """Return the text for people."""
        ...

    @property
    def param(self) -> str | None:
        """Return the invalid field."""
        ...

    @property
    def code(self) -> str | None:
        """Return the stable word for programs."""
        ...

    @property
    def retry_after_seconds(self) -> int:
        """Return the delay after which a retry may succeed; 0 if no delay helps."""
        ...


class InvalidRequest(RequestError):
    """The body is malformed, or requests something impossible. The message says what to change."""


class ContextTooLong(InvalidRequest):
    """Prompt and output together exceed the model's context or the KV cache."""

    code = "context_length_exceeded"


class BodyTooLarge(RequestError):
    """The request body exceeds ``--max-request-bytes``."""

    status = 413
    code = "request_too_large"


class BodyTooSlow(RequestError):
    """The request body did not arrive in time."""

    status = 408
    code = "request_timeout"


class Unauthorized(RequestError):
    """The request carries no API key, or an unknown one."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The request would affect the requests of others, which requires an admin key."""

    status = 403
    code = "admin_key_required"


class OriginRefused(RequestError):
    """A web page of an origin that is not allowed sent a request to a server without keys."""

    status = 403
    code = "origin_not_allowed"


class HostRefused(RequestError):
    """The request addresses a loopback server without keys by an unknown host name (DNS rebinding)."""

    status = 403
    code = "host_not_allowed"


class ModelNotFound(RequestError):
    """The request names a model that this service does not serve."""

    status = 404
    code = "model_not_found"


class ResponseNotFound(RequestError):
    """The request names a response, or an item of one, that is not stored here."""

    status = 404
    code = "response_not_found"


class QueueFull(RequestError):
    """Too many requests or prompt tokens wait already; the client may retry."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class Unavailable(RequestError):
    """The service is starting or draining; another replica may answer."""

    status = 503
    kind = "service_unavailable_error"
    code = "unavailable"


class DeadlineExceeded(RequestError):
    """The request's deadline passed, and the ranks did not confirm its end in time."""

    status = 504
    kind = "internal_server_error"
    code = "deadline_exceeded"


UNEXPECTED_ERROR: Final = "an internal error; see the server's log"
"""Message of an ``InternalError`` whose cause is a bug: it has no details for clients."""


class InternalError(RequestError):
    """The service failed. The message says where, and whether a retry may help."""

    status = 500
    kind = "internal_server_error"
    code = "internal_error"
