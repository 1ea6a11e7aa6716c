"""Log-probabilities in the shapes of OpenAI's two endpoints."""

import codecs
import math
from collections.abc import Sequence
from typing import Any, Final

from msgspec.structs import replace

from skiff_runtime.messages import TextLogprobs, TokenText

MIN_LOGPROB: Final = -9999.0
"""Stands for every lower value, minus infinity included, as in OpenAI's API: JSON has no infinity."""
_BYTES_PREFIX: Final = "bytes:"


def format_chat_logprobs(tokens: Sequence[TextLogprobs]) -> dict[str, Any]:
    """Return the ``logprobs`` object of a chat choice."""
    content = [
        {**_format_token(each.chosen), "top_logprobs": [_format_token(top) for top in each.top]}
        for each in tokens
    ]
    return {"content": content, "refusal": None}


def _format_token(token: TokenText) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": json_logprob(token.logprob), "bytes": list(token.data)}


def token_text(token: TokenText, bytes_prefix: str = "") -> str:
    r"""Return the text of a token; bytes that are not UTF-8 by themselves as ``\xf0\x9f``, after ``bytes_prefix``."""
    try:
        return token.data.decode()
    except UnicodeDecodeError:
        return bytes_prefix + "".join(f"\\x{byte:02x}" for byte in token.data)


def json_logprob(logprob: float) -> float | None:
    """Return a value that JSON can represent; None for NaN, which marks the first token of a prompt."""
    return None if math.isnan(logprob) else max(logprob, MIN_LOGPROB)


def format_prompt_logprobs(tokens: Sequence[TextLogprobs], top: int) -> list[dict[str, Any] | None]:
    """Return the ``prompt_logprobs`` of a response in vLLM's shape: for each token, the ``top`` ones and its own, by id.

    No token predicts the first one, so it has None.
    """
    return [
        None if math.isnan(each.chosen.logprob) else _format_prompt_position(each, top) for each in tokens
    ]


def _format_prompt_position(token: TextLogprobs, top: int) -> dict[str, Any]:
    ranked = [(one, rank) for rank, one in enumerate(token.top[:top], start=1)]
    return {
        str(one.token): {
            "logprob": json_logprob(one.logprob),
            "rank": rank,
            "decoded_token": token_text(one),
        }
        for one, rank in ((token.chosen, token.rank), *ranked)
    }


def keep_top(tokens: Sequence[TextLogprobs], count: int) -> list[TextLogprobs]:
    """Return log-probabilities with at most ``count`` of the most likely tokens."""
    return [replace(each, top=each.top[:count]) if len(each.top) > count else each for each in tokens]


class CompletionLogprobs:
    """Formats the ``logprobs`` objects of one completion choice, in order.

    It counts the characters of its tokens for ``text_offset``, the offset of each token in the text.
    """

    def __init__(self, prompt: str | None) -> None:
        """``prompt``: the echoed text before the output; None where the prompt's tokens are the echoed text."""
        self._prompt = prompt
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def format_prompt(self, tokens: Sequence[TextLogprobs]) -> dict[str, Any]:
        """Return the ``logprobs`` object of the prompt's next tokens."""
        offsets = []
        for each in tokens:
            offsets.append(self._offset)
            text = self._decoder.decode(each.chosen.data)
            # A special token that the tokenizer added, such as BOS, is no part of the echoed text.
            if self._prompt is None or self._prompt.startswith(text, self._offset):
                self._offset += len(text)
        return _columns(tokens, offsets)

    def begin_output(self, prompt_length: int) -> None:
        """Go on to the output, which begins after ``prompt_length`` characters of prompt."""
        self._offset = prompt_length
        self._decoder.reset()

    def format_output(self, tokens: Sequence[TextLogprobs]) -> dict[str, Any]:
        """Return the ``logprobs`` object of the next output tokens."""
        offsets = []
        for each in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(each.chosen.data))
        return _columns(tokens, offsets)


def _columns(tokens: Sequence[TextLogprobs], offsets: list[int]) -> dict[str, Any]:
    return {
        "tokens": [token_text(each.chosen, _BYTES_PREFIX) for each in tokens],
        "token_logprobs": [json_logprob(each.chosen.logprob) for each in tokens],
        "top_logprobs": [_top_logprobs(each) for each in tokens],
        "text_offset": offsets,
    }


def _top_logprobs(token: TextLogprobs) -> dict[str, float | None] | None:
    """Map the texts of the most likely tokens and of the chosen one to log-probabilities.

    Of two tokens with the same text the more likely one counts.
    """
    if math.isnan(token.chosen.logprob):
        return None
    logprobs: dict[str, float | None] = {}
    for each in (*token.top, token.chosen):
        logprobs.setdefault(token_text(each, _BYTES_PREFIX), json_logprob(each.logprob))
    return logprobs


def concatenate(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join several ``logprobs`` objects of a completion into one."""
    return {name: [each for part in parts for each in part[name]] for name in parts[0]}
