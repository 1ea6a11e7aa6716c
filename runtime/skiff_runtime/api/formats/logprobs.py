"""Log-probabilities in the shapes that OpenAI's two endpoints give them."""

import codecs
import math
from collections.abc import Sequence
from typing import Any, Final

from skiff_runtime.messages import TextLogprobs, TokenText

LEAST: Final = -9999.0
"""Stands for less likely than can be told, as OpenAI has it."""


def format_chat_logprobs(tokens: Sequence[TextLogprobs]) -> dict[str, Any]:
    """The ``logprobs`` object of a chat choice."""
    content = [{**_entry(each.chosen), "top_logprobs": [_entry(top) for top in each.top]} for each in tokens]
    return {"content": content, "refusal": None}


def _entry(token: TokenText) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": value(token.logprob), "bytes": list(token.data)}


def token_text(token: TokenText, escaped_as: str = "") -> str:
    r"""What a token writes; bytes that are no text by themselves as ``\xf0\x9f``, after ``escaped_as``."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return escaped_as + "".join(f"\\x{byte:02x}" for byte in token.data)


def value(logprob: float) -> float | None:
    """As JSON can tell it; None for the first token of a prompt, which has none."""
    return None if math.isnan(logprob) else max(logprob, LEAST)


class CompletionLogprobs:
    """Makes the ``logprobs`` objects of one choice, in order; keeps count of where in the text its tokens begin."""

    def __init__(self, prompt: str | None) -> None:
        """``prompt``: the echoed text before the answer, None where that is what its tokens write."""
        self._prompt = prompt
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def of_prompt(self, tokens: Sequence[TextLogprobs]) -> dict[str, Any]:
        """Of the prompt's next tokens."""
        offsets = []
        for each in tokens:
            offsets.append(self._offset)
            text = self._decoder.decode(each.chosen.data)
            if self._prompt is None or self._prompt.startswith(text, self._offset):  # else it writes nothing
                self._offset += len(text)
        return _columns(tokens, offsets)

    def begin_output(self, length: int) -> None:
        """The answer begins after ``length`` characters of prompt."""
        self._offset = length
        self._decoder.reset()

    def format_output(self, tokens: Sequence[TextLogprobs]) -> dict[str, Any]:
        """Of the answer's next tokens."""
        offsets = []
        for each in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(each.chosen.data))
        return _columns(tokens, offsets)


def _columns(tokens: Sequence[TextLogprobs], offsets: list[int]) -> dict[str, Any]:
    return {
        "tokens": [token_text(each.chosen, "bytes:") for each in tokens],
        "token_logprobs": [value(each.chosen.logprob) for each in tokens],
        "top_logprobs": [_likeliest(each) for each in tokens],
        "text_offset": offsets,
    }


def _likeliest(token: TextLogprobs) -> dict[str, float | None] | None:
    """Text -> log-probability of the likeliest tokens and the chosen one; of two with one text, the likelier."""
    if math.isnan(token.chosen.logprob):
        return None
    told: dict[str, float | None] = {}
    for each in (*token.top, token.chosen):
        told.setdefault(token_text(each, "bytes:"), value(each.logprob))
    return told


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several ``logprobs`` objects of a completion as one."""
    return {name: [each for part in parts for each in part[name]] for name in parts[0]}
