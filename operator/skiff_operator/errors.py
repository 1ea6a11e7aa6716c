"""The exceptions of the operator, divided into retryable and permanent ones."""


class OperatorError(Exception):
    """The root of the tree; `reason` is the CamelCase reason of a condition or an Event."""

    reason = "OperatorError"


class Retryable(OperatorError):
    """The same work may succeed later without any change, `retry_after_seconds` from now at the earliest."""

    reason = "TemporaryError"
    retry_after_seconds = 0.0


class Permanent(OperatorError):
    """Only a change of the spec, of the cluster or of the operator's role can help."""

    reason = "PermanentError"


class InvalidSpec(Permanent):
    """The spec of the InferenceService is invalid; the message says what to change."""

    reason = "InvalidSpec"


class SettingsError(Permanent):
    """An option of the operator is invalid."""

    reason = "InvalidSettings"


class ApiUnavailable(Retryable):
    """The API server could not be reached, was too slow, or was too busy (429, 5xx)."""

    reason = "ApiUnavailable"


class ApiBusy(ApiUnavailable):
    """The API server asked to retry one request later; others may succeed."""

    def __init__(self, message: str, *, retry_after_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class ApiFailed(ApiBusy):
    """500: the API server, or an admission webhook that it called, failed on this request."""

    reason = "ApplyFailed"


class ApiConflict(Retryable):
    """The object, or its quota, was changed, replaced or deleted since it was read."""

    reason = "Conflict"


class ApiRefused(Permanent):
    """The API server refused the request. `status` is the HTTP code, the message is the server's own."""

    reason = "ApplyFailed"

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ApiNotFound(ApiRefused):
    """404: the object, or its kind, does not exist."""

    reason = "NotFound"


class ApiAlreadyExists(ApiRefused):
    """409: an object of that name exists."""

    reason = "AlreadyExists"
