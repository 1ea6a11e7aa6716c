"""A validated generation request, and the formatters that write its response.

Each endpoint parses its request body into a ``RequestSpec``. The rest of the API depends on no endpoint: the dispatcher
sends the prompts to a tokenizer, and the response writers pass the results to the formatters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from skiff_runtime.messages import (
    ChatPrompt,
    FinishReason,
    Grammar,
    PoolingSpec,
    PromptOptions,
    RequestFailed,
    SamplingSpec,
    StreamOpened,
    TextLogprobs,
    TextOptions,
    Usage,
)

FINISH_REASONS: Final = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.TIMEOUT: "length",
}
"""Finish reasons as clients see them. A deadline appears as "length": OpenAI's API has no other word for an answer that
was cut short."""

Prompt = str | list[int] | ChatPrompt


class ChoiceOutput(NamedTuple):
    """The complete output of one choice.

    ``logprobs`` has an entry for each of its tokens, ``prompt_logprobs`` one for each token of the prompt; each is empty
    unless the request asks for it. With pooling, ``vector`` is the result: bytes of ``Wire.VECTOR``.
    """

    text: str
    token_ids: list[int]
    logprobs: list[TextLogprobs]
    prompt_logprobs: list[TextLogprobs]
    finish_reason: FinishReason
    vector: bytes = b""


class ChoiceFormatter(Protocol):
    """Writes one choice. All methods but ``format_full`` return server-sent events, ready to send; b"" is no event."""

    def format_opening(self) -> bytes:
        """Return the events before the first increment."""
        ...

    def format_prompt_logprobs(self, tokens: list[TextLogprobs]) -> bytes:
        """Return the events for the log-probabilities of the prompt's next tokens."""
        ...

    def format_delta(self, text: str, token: int, logprobs: TextLogprobs | None) -> bytes:
        """Return the events of one increment; ``text`` may be "", ``token`` may be ``NO_TOKEN``."""
        ...

    def format_closing(self, finish_reason: FinishReason) -> bytes:
        """Return the events after the last increment."""
        ...

    def format_full(self, output: ChoiceOutput) -> dict[str, Any]:
        """Return the choice as it stands in a response that is not streamed."""
        ...


class ResponseFormatter(Protocol):
    """Writes the response to one request, which has one or more choices. ``id`` is the id in the response."""

    id: str

    def make_choice_formatter(self, index: int) -> ChoiceFormatter:
        """Return the formatter of choice ``index``."""
        ...

    def start_choice(self, index: int, opened: StreamOpened) -> None:
        """Note that the engine has begun to compute choice ``index`` of a stream."""
        ...

    def format_ending(self, usage: Usage) -> bytes:
        """Return the last events of a stream, which follow the end of every choice."""
        ...

    def format_full(self, choices: list[dict[str, Any]], usage: Usage) -> bytes:
        """Return the JSON body of a response that is not streamed."""
        ...

    def format_error(self, error: RequestFailed, request_id: str) -> bytes:
        """Return the JSON body of a response whose request failed before anything was written."""
        ...

    def format_error_event(self, error: RequestFailed, request_id: str) -> bytes:
        """Return the events that end a stream whose request failed."""
        ...


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One validated request: ``copies`` choices for each of its prompts, numbered prompt by prompt.

    ``is_incremental``: rows go to the formatter one by one even without streaming, so one code path builds both responses.
    ``user`` is the end user that the client names, for the log. The request shares cached prefixes only with requests
    that have the same ``cache_salt``. With ``pooling`` each prompt yields a vector, and nothing is generated.
    ``adapter_id`` is the LoRA adapter that it runs on, 0 for the base model.
    """

    prompts: Sequence[Prompt]
    sampling: SamplingSpec
    text: TextOptions
    formatter: ResponseFormatter
    stream: bool
    is_incremental: bool = False
    copies: int = 1
    priority: int = 0
    grammar: Grammar | None = None
    user: str | None = None
    cache_salt: str | None = None
    prompt_options: PromptOptions = PromptOptions()
    pooling: PoolingSpec | None = None
    adapter_id: int = 0

    @property
    def num_choices(self) -> int:
        """Number of choices over all prompts."""
        return len(self.prompts) * self.copies
