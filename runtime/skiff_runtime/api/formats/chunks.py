"""What the streams of OpenAI's two endpoints have in common: the head of each chunk, and what they tell of usage."""

import secrets
import time
from collections.abc import Callable
from typing import Any

from skiff_runtime.api.schemas.request_bodies import StreamOptions
from skiff_runtime.api.sse import DONE, EventTemplate, event
from skiff_runtime.api.usage import format_usage, sum_usage
from skiff_runtime.messages import NO_TOKEN, StreamOpened, Usage


class Chunks:
    """Writes the events of one reply. ``continuous``: each tells the usage so far."""

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
        self._include = options is not None and bool(options.include_usage or options.continuous_usage_stats)
        self.continuous = options is not None and bool(options.continuous_usage_stats)
        self._copies = copies
        self._usages = [Usage(0, 0, 0)] * choices

    def event(self, choice: dict[str, Any]) -> bytes:
        """An event of one choice."""
        return event(self._chunk(choice))

    def frame(self, choice_with: Callable[[str], dict[str, Any]]) -> EventTemplate:
        """Events of one choice that are alike but for one value, for which ``choice_with`` is given a placeholder."""
        hole = f"<{self._head['id']}>"
        return EventTemplate(self._chunk(choice_with(hole)), hole)

    def open(self, index: int, opened: StreamOpened) -> None:
        """Choice ``index`` is being computed."""
        self._usages[index] = Usage(opened.prompt_tokens, 0, opened.cached_tokens)

    def count(self, index: int, token: int) -> None:
        """Choice ``index`` has one more token."""
        if token != NO_TOKEN:
            prompt, completion, cached = _counts(self._usages[index])
            self._usages[index] = Usage(prompt, completion + 1, cached)

    def ending(self, usage: Usage) -> bytes:
        """The last events of the stream."""
        if not self._include:
            return DONE
        return event({**self._head, "choices": [], "usage": format_usage(usage)}) + DONE

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = {**self._head, "choices": [choice]}
        if self.continuous:
            return {**chunk, "usage": format_usage(sum_usage(self._usages, self._copies))}
        return {**chunk, "usage": None} if self._include else chunk


def _counts(usage: Usage) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens


def make_response_head(prefix: str, kind: str, *, model: str, fingerprint: str) -> dict[str, Any]:
    """The fields that begin a reply of OpenAI's endpoints; ``kind`` is its ``object``."""
    return {
        "id": f"{prefix}-{secrets.token_hex(12)}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }
