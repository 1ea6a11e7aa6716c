"""What a caller of ``LLM`` gets: increments while they come, and completions made of them."""

from dataclasses import dataclass
from math import isnan

import msgspec

from skiff_runtime.messages import FinishReason, TextLogprobs, Usage


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token, the bytes it writes by itself, and its natural log-probability.

    ``logprob`` is None for the first token of a prompt. ``top``: the likeliest tokens of this position.
    """

    token_id: int
    data: bytes
    logprob: float | None
    top: tuple["TokenLogprob", ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """News of one completion. ``index`` is its place among those that were asked for.

    ``text`` may be "" while bytes are held back. With ``finish_reason`` ("stop", "length"), it is the last one
    and tells how many tokens the prompt has, and how many of them were found in the cache.
    """

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """One completion of one prompt. ``finish_reason``: "stop" or "length".

    ``logprobs`` has an entry for each of ``token_ids`` and ``prompt_logprobs`` one for each token of the
    prompt, where the sampling asks for them; else they are empty.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    logprobs: list[TokenLogprob]
    prompt_logprobs: list[TokenLogprob]


class Draft:
    """A completion while its increments come; of a hundred thousand kept ones, collecting garbage would take long."""

    __slots__ = ("_completion", "_logprobs", "_prompt_logprobs", "_texts", "_token_ids")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprob] = []
        self._prompt_logprobs: list[TokenLogprob] = []
        self._completion: Completion | None = None

    def add(self, increment: CompletionDelta) -> None:
        """Take the next increment."""
        self._texts.append(increment.text)
        self._token_ids += increment.token_ids
        self._logprobs += increment.logprobs
        self._prompt_logprobs += increment.prompt_logprobs
        if increment.finish_reason is not None:
            self._completion = self._ended(increment, increment.finish_reason)
            # Freed now, while others may still run: at the end of a call its caller would wait for it.
            self._texts.clear()

    def completion(self) -> Completion:
        """All increments put together, once the last has come."""
        assert self._completion is not None, "the last increment ends the completion"
        return self._completion

    def _ended(self, last: CompletionDelta, finish_reason: str) -> Completion:
        return Completion(
            text="".join(self._texts),
            token_ids=self._token_ids,
            finish_reason=finish_reason,
            prompt_tokens=last.prompt_tokens,
            cached_tokens=last.cached_tokens,
            logprobs=self._logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )


def ended(
    index: int,
    text: str,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprob, ...],
    finish: int,
    usage: Usage,
) -> CompletionDelta:
    """The last increment of a completion."""
    return CompletionDelta(
        index,
        text,
        token_ids,
        logprobs,
        finish_reason=FinishReason(finish).name.lower(),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
    )


def to_token_logprob(told: TextLogprobs) -> TokenLogprob:
    """One position's log-probabilities as a caller sees them."""
    chosen, value = told.chosen, told.chosen.logprob
    top = tuple([TokenLogprob(each.token, each.data, each.logprob) for each in told.top])
    return TokenLogprob(chosen.token, chosen.data, None if isnan(value) else value, top)
