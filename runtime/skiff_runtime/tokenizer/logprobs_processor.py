"""Logprobs processor: adds the bytes of each token to the scheduler's log-probabilities."""

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
from skiff_runtime.vocabulary.decode_stream import TokenDecoder

PROMPT_ROW = -1
"""Row of a token of the prompt, which has no row in the batch."""


class LogprobsProcessor:
    """Converts log-probabilities of token ids into those of token texts."""

    def __init__(self, decoder: TokenDecoder) -> None:
        self._decoder = decoder

    def convert_rows(
        self, logprobs: list[TokenLogprobs], tokens: NDArray[np.int32], dropped: list[int]
    ) -> list[TextLogprobs]:
        """Convert the rows of a batch. Omit the ``dropped`` rows (ascending) and renumber the others accordingly."""
        gone = set(dropped)
        shifts = np.searchsorted(np.array(dropped, np.int64), [each.row for each in logprobs]).tolist()
        return [
            TextLogprobs(
                row=each.row - shift,
                chosen=self._text(int(tokens[each.row]), each.logprob),
                top=self._texts(each.top_ids, each.top_logprobs),
            )
            for each, shift in zip(logprobs, shifts, strict=True)
            if each.row not in gone
        ]

    def convert_prompt(self, logprobs: PromptLogprobs) -> PromptTextLogprobs:
        """Convert a run of prompt tokens."""
        chosen = self._texts(logprobs.token_ids, logprobs.logprobs)
        top = self._texts(logprobs.top_ids, logprobs.top_logprobs)
        ranks = np.frombuffer(logprobs.ranks, Wire.TOKEN).tolist() or [0] * len(chosen)
        tokens = [
            TextLogprobs(
                row=PROMPT_ROW,
                chosen=each,
                top=[
                    one
                    for one in top[index * logprobs.top : (index + 1) * logprobs.top]
                    if one.token != NO_TOKEN
                ],
                rank=ranks[index],
            )
            for index, each in enumerate(chosen)
        ]
        return PromptTextLogprobs(uid=logprobs.uid, start=logprobs.start, tokens=tokens)

    def _texts(self, ids: bytes, values: bytes) -> list[TokenText]:
        tokens = np.frombuffer(ids, Wire.TOKEN).tolist()
        logprobs = np.frombuffer(values, Wire.LOGPROB).tolist()
        token_bytes = self._decoder.token_bytes
        return [
            TokenText(token, token_bytes(token), logprob)
            for token, logprob in zip(tokens, logprobs, strict=True)
        ]

    def _text(self, token: int, logprob: float) -> TokenText:
        return TokenText(token=token, data=self._decoder.token_bytes(token), logprob=logprob)
