"""One tree of exceptions, and how each looks to a client.

``RequestError`` and below carry what OpenAI's error object needs; everything else
is internal and becomes an exit code or a 500 at a process boundary.
"""

from typing import Final

CLIENT_CLOSED_REQUEST: Final = 499


class SkiffError(Exception):
    """Base of every error that Skiff raises on purpose."""


class ConfigError(SkiffError):
    """A flag, environment variable or model directory that cannot be served as it is."""


class ModelError(ConfigError):
    """A model's files are missing, malformed or of an architecture that is not supported."""


class FetchError(SkiffError):
    """A model could not be downloaded."""


class StartupError(SkiffError):
    """A process did not become ready in time, or died before it did."""


class RequestError(SkiffError):
    """A request that ends with an error of its own; others go on undisturbed.

    ``status`` is the HTTP status, ``kind`` OpenAI's ``error.type``, ``param`` the
    offending field and ``code`` a stable word that programs may test. Where a retry may help,
    ``retry_after_seconds`` tells when; 0 for: at once, or no matter.
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


class InvalidRequest(RequestError):
    """The body is malformed, or names something that cannot be done. The message says what to change."""


class ContextTooLong(InvalidRequest):
    """Prompt and output together exceed what the model or the KV cache can hold."""

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
    """The request carries no key, or none that opens this service."""

    status = 401
    code = "invalid_api_key"


class Forbidden(RequestError):
    """The request acts on the requests of others, which needs an admin key."""

    status = 403
    code = "admin_key_required"


class OriginRefused(RequestError):
    """A page of an origin that may not use this service asks for something that a key would protect."""

    status = 403
    code = "origin_not_allowed"


class HostRefused(RequestError):
    """The request addresses a loopback server without keys by a name that is not known to be its own."""

    status = 403
    code = "host_not_allowed"


class ModelNotFound(RequestError):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class QueueFull(RequestError):
    """Too many requests wait already; the client may retry."""

    status = 429
    kind = "rate_limit_error"
    code = "queue_full"


class Unavailable(RequestError):
    """The service is starting or draining; another replica may answer."""

    status = 503
    kind = "service_unavailable_error"
    code = "unavailable"


class DeadlineExceeded(RequestError):
    """The request's time was over, and its end was not confirmed either."""

    status = 504
    kind = "internal_server_error"
    code = "deadline_exceeded"


class InternalError(RequestError):
    """The service failed. The message says where, and whether a retry helps."""

    status = 500
    kind = "internal_server_error"
    code = "internal_error"
