"""Log-probabilities with the bytes of their tokens, as the API shows them."""

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.messages import (
    NO_TOKEN,
    PromptLogprobs,
    PromptTextLogprobs,
    TextLogprobs,
    TokenLogprobs,
    TokenText,
    Wire,
)
from skiff_runtime.vocabulary.decode_stream import Decoder

NO_ROW = -1
"""The row of a token that stands in a prompt."""


class LogprobsProcessor:
    """Adds texts to what the scheduler tells of log-probabilities."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def rows(
        self, told: list[TokenLogprobs], tokens: NDArray[np.int32], dropped: list[int]
    ) -> list[TextLogprobs]:
        """What rows of a batch tell, numbered as they are once the ``dropped`` rows (ascending) are gone."""
        gone = set(dropped)
        shifts = np.searchsorted(np.array(dropped, np.int64), [each.row for each in told]).tolist()
        return [
            TextLogprobs(
                row=each.row - shift,
                chosen=self._text(int(tokens[each.row]), each.logprob),
                top=self._texts(each.top_ids, each.top_logprobs),
            )
            for each, shift in zip(told, shifts, strict=True)
            if each.row not in gone
        ]

    def prompt(self, told: PromptLogprobs) -> PromptTextLogprobs:
        """What a run of a prompt's tokens tells."""
        chosen = self._texts(told.token_ids, told.logprobs)
        top = self._texts(told.top_ids, told.top_logprobs)
        tokens = [
            TextLogprobs(
                row=NO_ROW,
                chosen=each,
                top=[one for one in top[index * told.top : (index + 1) * told.top] if one.token != NO_TOKEN],
            )
            for index, each in enumerate(chosen)
        ]
        return PromptTextLogprobs(uid=told.uid, start=told.start, tokens=tokens)

    def _texts(self, ids: bytes, logprobs: bytes) -> list[TokenText]:
        tokens = np.frombuffer(ids, Wire.TOKEN).tolist()
        values = np.frombuffer(logprobs, Wire.LOGPROB).tolist()
        data = self._decoder.token_bytes
        return [TokenText(token, data(token), value) for token, value in zip(tokens, values, strict=True)]

    def _text(self, token: int, logprob: float) -> TokenText:
        return TokenText(token=token, data=self._decoder.token_bytes(token), logprob=logprob)
