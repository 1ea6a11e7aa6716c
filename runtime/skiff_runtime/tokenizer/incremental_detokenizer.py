"""One request as the detokenizer sees it: its text so far, its stop strings, its token counts."""

from skiff_runtime.messages import NO_TOKEN, FinishReason, StreamOpened, Usage
from skiff_runtime.tokenizer.stop_strings import StopStringMatcher
from skiff_runtime.vocabulary.decode_stream import DecodeStream


class Reply:
    """Turns one request's tokens into text. ``stopped``: a stop string was found, and nothing more is told."""

    __slots__ = (
        "_cached",
        "_completion",
        "_min_tokens",
        "_prompt",
        "_shows_stop",
        "_stops",
        "_stream",
        "stopped",
    )

    def __init__(self, opened: StreamOpened, stream: DecodeStream) -> None:
        self._stream = stream
        text = opened.text
        self._stops = (
            StopStringMatcher(text.stop, include=text.include_stop_str_in_output) if text.stop else None
        )
        self._shows_stop = text.include_stop_str_in_output
        self._prompt = opened.prompt_tokens
        self._cached = opened.cached_tokens
        self._completion = 0
        self._min_tokens = opened.min_tokens
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that ``token`` completes; sets ``stopped`` where that completes a stop string."""
        self._completion += 1
        text = self._stream.push(token)
        if self._stops is None or self._completion <= self._min_tokens:
            return text
        return self._match(self._stops, text)

    def end(self, token: int, finish: FinishReason) -> str:
        """The last text of a request that the scheduler ended; ``token`` may be ``NO_TOKEN``.

        The token that means the end (``FinishReason.STOP``) is counted, but is no part of the answer unless stops are
        to be included.
        """
        text = ""
        if token != NO_TOKEN and (finish != FinishReason.STOP or self._shows_stop):
            text = self.push(token)
        elif token != NO_TOKEN:
            self._completion += 1
        if self.stopped:
            return text
        rest = self._stream.flush()
        if self._stops is None:
            return text + rest
        text += self._match(self._stops, rest)
        return text if self.stopped else text + self._stops.flush()

    def usage(self) -> Usage:
        """Token counts so far."""
        return Usage(
            prompt_tokens=self._prompt, completion_tokens=self._completion, cached_tokens=self._cached
        )

    def _match(self, stops: StopStringMatcher, text: str) -> str:
        shown = stops.push(text) if text else ""
        self.stopped = stops.stopped
        return shown
