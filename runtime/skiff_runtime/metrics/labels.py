"""Values of the metrics' labels."""

from enum import StrEnum


class Endpoint(StrEnum):
    """Label ``endpoint`` of requests."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    GENERATE = "generate"


class Outcome(StrEnum):
    """Label ``outcome`` of requests. Rejected: refused with a 4xx or 503. Failed: the service is to blame."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"
    REJECTED = "rejected"


class RejectionReason(StrEnum):
    """Label ``reason`` of refused requests."""

    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    QUEUE_FULL = "queue_full"
    UNAVAILABLE = "unavailable"


class AbortReason(StrEnum):
    """Label ``reason`` of aborted requests: who wanted their end."""

    DISCONNECT = "disconnect"
    ENDPOINT = "endpoint"
    DEADLINE = "deadline"
    DRAIN = "drain"


class StepKind(StrEnum):
    """Label ``kind`` of steps: what they computed."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
