"""The token counts of a request, read where they cost nothing for each event of a stream.

A pod of Skiff reports them beside the body (``api/http/usage_header.py``). For other servers they are taken from the body of a
JSON response, or from the last events of a stream. A stream that ended early, or has no counts, is estimated: most
servers send an event for each token.
"""

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

from skiff_runtime.api.http.usage_header import TokenCounts

TAIL_EVENTS: Final = 4
"""Events at the end of a stream among which the counts are: OpenAI's last event is ``[DONE]``, Anthropic's ``message_stop``."""
_DATA: Final = b"data:"
_NAME: Final = b'"usage"'


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts of a request. ``estimated``: at least one of them was not reported."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0
    estimated: bool = False

    @classmethod
    def exact(cls, counts: TokenCounts) -> "TokenUsage":
        """Return reported counts."""
        return cls(counts.prompt, counts.cached, counts.completion)

    @property
    def total(self) -> int:
        """Return the tokens that count against a limit."""
        return self.prompt + self.completion


_Count = Annotated[int, msgspec.Meta(ge=0, le=10**15)]


class _Details(msgspec.Struct):
    cached_tokens: _Count | None = None


class _Usage(msgspec.Struct):
    """The ``usage`` of OpenAI's endpoints, of its Responses API, or of Anthropic's Messages API."""

    prompt_tokens: _Count | None = None
    completion_tokens: _Count | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens: _Count | None = None
    output_tokens: _Count | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: _Count | None = None
    cache_creation_input_tokens: _Count | None = None


class _Response(msgspec.Struct):
    usage: _Usage | None = None


class _Body(msgspec.Struct):
    """A JSON response, or an event. The Responses API has the response inside of its last event."""

    usage: _Usage | None = None
    response: _Response | None = None


_DECODER: Final = msgspec.json.Decoder(_Body)


def read_body_usage(body: bytes) -> TokenUsage | None:
    """Return the counts in a JSON response or in the data of an event; None if it has none."""
    if _NAME not in body:
        return None
    try:
        parsed = _DECODER.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None
    usage = parsed.usage or (parsed.response.usage if parsed.response is not None else None)
    return None if usage is None else _counts(usage)


def read_stream_usage(tail: bytes) -> TokenUsage | None:
    """Return the counts in the last events of a stream; None if they have none. ``tail``: the last bytes of the stream."""
    data = [line[len(_DATA) :] for line in tail.splitlines() if line.startswith(_DATA)]
    for each in reversed(data[-TAIL_EVENTS:]):
        if (usage := read_body_usage(each)) is not None:
            return usage
    return None


def _counts(usage: _Usage) -> TokenUsage | None:
    details = usage.prompt_tokens_details or usage.input_tokens_details
    cached = details.cached_tokens or 0 if details is not None else 0
    if usage.prompt_tokens is not None:
        return TokenUsage(usage.prompt_tokens, cached, usage.completion_tokens or 0)
    if usage.input_tokens is None:
        return None
    # Anthropic's API has the cached tokens beside the others, not among them.
    beside = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return TokenUsage(
        usage.input_tokens + beside, cached + (usage.cache_read_input_tokens or 0), usage.output_tokens or 0
    )
