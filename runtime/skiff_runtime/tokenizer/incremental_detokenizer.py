"""Incremental detokenizer of one request: its text stream, its stop strings and its token counts."""

from skiff_runtime.messages import NO_TOKEN, FinishReason, StreamOpened, Usage
from skiff_runtime.tokenizer.stop_strings import StopStringMatcher
from skiff_runtime.vocabulary.decode_stream import DecodeStream


class IncrementalDetokenizer:
    """Turns the tokens of one request into text.

    ``stopped`` is set once a stop string was found; the caller drops later tokens.
    """

    __slots__ = (
        "_cached_tokens",
        "_completion_tokens",
        "_include_stop",
        "_min_tokens",
        "_prompt_tokens",
        "_stop_strings",
        "_stream",
        "stopped",
    )

    def __init__(self, opened: StreamOpened, stream: DecodeStream) -> None:
        self._stream = stream
        text = opened.text
        self._include_stop = text.include_stop_str_in_output
        self._stop_strings = StopStringMatcher(text.stop, include=self._include_stop) if text.stop else None
        self._prompt_tokens = opened.prompt_tokens
        self._cached_tokens = opened.cached_tokens
        self._completion_tokens = 0
        self._min_tokens = opened.min_tokens
        self.stopped = False

    def push(self, token: int) -> str:
        """Return the text that ``token`` completes. Sets ``stopped`` if the text completes a stop string."""
        self._completion_tokens += 1
        text = self._stream.push(token)
        # The matcher does not see text before min_tokens, so a stop string that begins there is ignored.
        if self._stop_strings is None or self._completion_tokens <= self._min_tokens:
            return text
        return self._match(self._stop_strings, text)

    def finish(self, token: int, finish: FinishReason) -> str:
        """Return the last text of a request that the scheduler ended; ``token`` may be ``NO_TOKEN``.

        A token that ended the answer (``FinishReason.STOP``) is counted, but its text is part of the answer only with
        ``include_stop_str_in_output``.
        """
        text = ""
        if token != NO_TOKEN and (finish != FinishReason.STOP or self._include_stop):
            text = self.push(token)
        elif token != NO_TOKEN:
            self._completion_tokens += 1
        if self.stopped:
            return text
        rest = self._stream.flush()
        if self._stop_strings is None:
            return text + rest
        text += self._match(self._stop_strings, rest)
        return text if self.stopped else text + self._stop_strings.flush()

    def usage(self) -> Usage:
        """Return the token counts so far, and the stop string that was found."""
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._completion_tokens,
            cached_tokens=self._cached_tokens,
            stop_string=None if self._stop_strings is None else self._stop_strings.found,
        )

    def _match(self, stop_strings: StopStringMatcher, text: str) -> str:
        shown = stop_strings.push(text) if text else ""
        self.stopped = stop_strings.stopped
        return shown
