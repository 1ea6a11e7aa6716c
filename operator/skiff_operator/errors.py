"""Every error that the operator raises by name, split by what to do about it: try again, or tell the user."""


class OperatorError(Exception):
    """The root of the tree; `reason` is the CamelCase word that a condition or an Event shows."""

    reason = "OperatorError"


class Retryable(OperatorError):
    """The same work may succeed later without anyone changing anything."""

    reason = "TemporaryError"


class Permanent(OperatorError):
    """Only a change of the spec, of the cluster or of the operator's rights can help."""

    reason = "PermanentError"


class InvalidSpec(Permanent):
    """The InferenceService asks for something impossible; the message says what to change."""

    reason = "InvalidSpec"


class SettingsError(Permanent):
    """The operator was started with an option that it cannot honour."""

    reason = "InvalidSettings"


class ApiUnavailable(Retryable):
    """The API server could not be reached, was too slow, or was too busy (429, 5xx)."""

    reason = "ApiUnavailable"


class ApiBusy(ApiUnavailable):
    """The API server answered one request with "try again later"; others may succeed."""


class ApiFailed(ApiBusy):
    """500: the API server, or an admission webhook that it had to call, failed over this one request."""

    reason = "ApplyFailed"


class ApiConflict(Retryable):
    """The object is no longer as it was read: someone wrote, replaced or deleted it, or its quota, meanwhile."""

    reason = "Conflict"


class ApiRefused(Permanent):
    """The API server answered and said no. `status` is the HTTP code, the message the server's own."""

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
