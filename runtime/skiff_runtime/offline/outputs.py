"""Outputs of the offline ``LLM``: completions, and the deltas of which they consist."""

from dataclasses import dataclass, replace
from math import isnan

import msgspec

from skiff_runtime.messages import FinishReason, TextLogprobs, Usage


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token, the bytes of its own text, and its natural log-probability.

    ``logprob`` is None for the first token of a prompt. ``top`` contains the most likely tokens of the position.
    """

    token_id: int
    data: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """The part of a completion that one step adds. ``index`` is the completion's position in the order of prompts.

    ``text`` may be "" while the bytes of an incomplete character or of a possible stop string are held back. Only
    the last delta has a ``finish_reason`` ("stop" or "length") and the token counts. ``vector`` (bytes of ``Wire.VECTOR``)
    is the result of a request with pooling, which has no text.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    vector: bytes = b""


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of one prompt. ``finish_reason`` is "stop" or "length".

    ``logprobs`` has an entry for each of ``token_ids``, and ``prompt_logprobs`` for each token of the prompt, if the
    sampling parameters request them; otherwise they are empty. ``cached_tokens`` counts the tokens of the prompt
    that the prefix cache contained.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]


class CompletionBuilder:
    """Joins the deltas of one completion.

    It keeps no delta: with hundreds of thousands of small objects alive, each garbage collection would take long.
    """

    __slots__ = ("_completion", "_logprobs", "_prompt_logprobs", "_texts", "_token_ids")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._completion: Completion | None = None

    def add(self, delta: CompletionDelta) -> None:
        """Append the next delta."""
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        if delta.finish_reason is not None:
            self._completion = self._build(delta, delta.finish_reason)
            # Freed now, while other requests still run; at the end of the call, its caller would wait for it.
            self._texts.clear()

    def completion(self) -> Completion:
        """Return the completion, once its last delta was added."""
        assert self._completion is not None, "the completion has not ended"
        return self._completion

    def _build(self, last: CompletionDelta, finish_reason: str) -> Completion:
        return Completion(
            text="".join(self._texts),
            token_ids=self._token_ids,
            finish_reason=finish_reason,
            prompt_tokens=last.prompt_tokens,
            cached_tokens=last.cached_tokens,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )


def final_delta(delta: CompletionDelta, finish: int, usage: Usage) -> CompletionDelta:
    """Return ``delta`` as the last one of its completion, with its finish reason and token counts."""
    return replace(
        delta,
        finish_reason=FinishReason(finish).name.lower(),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
    )


def to_token_logprob(logprobs: TextLogprobs) -> TokenLogprob:
    """Convert the log-probabilities of one position from the message; NaN there becomes None."""
    chosen, value = logprobs.chosen, logprobs.chosen.logprob
    top = tuple([TokenLogprob(each.token, each.data, each.logprob) for each in logprobs.top])
    return TokenLogprob(chosen.token, chosen.data, None if isnan(value) else value, top)
