"""Values of the metrics' labels."""

from enum import StrEnum
from typing import Final

from skiff_runtime.messages import FinishReason


class Endpoint(StrEnum):
    """Label ``endpoint`` of requests."""

    CHAT = "chat"
    COMPLETIONS = "completions"
    GENERATE = "generate"
    MESSAGES = "messages"
    RESPONSES = "responses"


class Outcome(StrEnum):
    """Label ``outcome`` of requests. ``REJECTED``: by a 4xx or 503. ``FAILED``: by an error of the service."""

    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"
    REJECTED = "rejected"


FINISH_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.TIMEOUT: "timeout",
}
"""Label ``finish_reason`` of requests that ended with a response."""


class RejectionReason(StrEnum):
    """Label ``reason`` of rejected requests."""

    INVALID = "invalid"
    UNAUTHORIZED = "unauthorized"
    FORBIDDEN = "forbidden"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    TOO_SLOW = "too_slow"
    QUEUE_FULL = "queue_full"
    UNAVAILABLE = "unavailable"


class AbortReason(StrEnum):
    """Label ``reason`` of aborted requests."""

    DISCONNECT = "disconnect"
    ENDPOINT = "endpoint"
    DEADLINE = "deadline"
    DRAIN = "drain"


class StepKind(StrEnum):
    """Label ``kind`` of steps, by the tokens they computed: of prompts, decoded ones, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
