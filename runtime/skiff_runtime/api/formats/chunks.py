"""Chunks of a stream and token usage in the shapes of OpenAI's two endpoints."""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from skiff_runtime.api.schemas.request_bodies import StreamOptions
from skiff_runtime.messages import NO_TOKEN, StreamOpened, Usage, Wire
from skiff_runtime.sse import DONE_EVENT, EventTemplate, encode_event


class ChunkWriter:
    """Writes the events of one streamed response. ``continuous_usage``: each event contains the usage so far."""

    def __init__(
        self,
        head: dict[str, Any],
        options: StreamOptions | None,
        *,
        choices: int,
        copies: int,
    ) -> None:
        """``head``: the fields of every chunk before ``choices``."""
        self._head = head
        self._include_usage = options is not None and bool(
            options.include_usage or options.continuous_usage_stats
        )
        self.continuous_usage = options is not None and bool(options.continuous_usage_stats)
        self._copies = copies
        self._usages = [Usage(0, 0, 0)] * choices

    def format_event(self, choice: dict[str, Any], **fields: Any) -> bytes:
        """Return an event with one choice; ``fields`` are further members of the chunk."""
        return encode_event({**self._chunk(choice), **fields})

    def make_template(self, choice_with: Callable[[str], dict[str, Any]]) -> EventTemplate:
        """Return a template for events of one choice that differ in one value.

        ``choice_with`` is called with a placeholder for the value and returns the choice.
        """
        # The response's id is random, so that no other string of the chunk equals the placeholder.
        placeholder = f"<{self._head['id']}>"
        return EventTemplate(self._chunk(choice_with(placeholder)), placeholder)

    def start_choice(self, index: int, opened: StreamOpened) -> None:
        """Note that the engine has begun to compute choice ``index``."""
        self._usages[index] = Usage(opened.prompt_tokens, 0, opened.cached_tokens)

    def count(self, index: int, token: int) -> None:
        """Count a token of choice ``index``."""
        if token != NO_TOKEN:
            usage = self._usages[index]
            self._usages[index] = Usage(usage.prompt_tokens, usage.completion_tokens + 1, usage.cached_tokens)

    def format_ending(self, usage: Usage) -> bytes:
        """Return the last events of the stream."""
        if not self._include_usage:
            return DONE_EVENT
        return encode_event({**self._head, "choices": [], "usage": format_usage(usage)}) + DONE_EVENT

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": [choice]}
        if self.continuous_usage:
            return {**chunk, "usage": format_usage(sum_usage(self._usages, self._copies))}
        # OpenAI writes "usage": null in each chunk of a stream whose last event has the usage.
        return {**chunk, "usage": None} if self._include_usage else chunk


def make_response_head(prefix: str, kind: str, *, model: str, fingerprint: str) -> dict[str, Any]:
    """Return the first fields of a response of OpenAI's endpoints; ``kind`` is its ``object``."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }


def decode_token_ids(data: bytes) -> list[int]:
    """Return the token ids of a message's column."""
    token_ids: list[int] = np.frombuffer(data, Wire.TOKEN).tolist()
    return token_ids


def format_usage(usage: Usage) -> dict[str, Any]:
    """Return the ``usage`` object of a response."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def sum_usage(choices: Sequence[Usage], copies: int) -> Usage:
    """Sum the usage of all choices of a request, ``copies`` for each prompt, in order; each prompt counts once.

    A prompt's cached tokens are those of the choice that found the fewest: the others found what that one had computed.
    Only a request with one choice has a stop string.
    """
    if len(choices) == 1:
        return choices[0]
    prompt = cached = 0
    for start in range(0, len(choices), copies):
        started = [usage for usage in choices[start : start + copies] if usage.prompt_tokens]
        if started:
            prompt += started[0].prompt_tokens
            cached += min(usage.cached_tokens for usage in started)
    return Usage(prompt, sum(usage.completion_tokens for usage in choices), cached)
