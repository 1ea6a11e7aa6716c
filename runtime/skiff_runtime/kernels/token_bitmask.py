"""Masks with one bit for each token, applied to logits on any device."""

from typing import Final

import numpy as np
import torch

BITS_PER_WORD: Final = 32
"""Tokens in a word of a mask."""


def bitmask_words(vocab_size: int) -> int:
    """Words of a mask for so many tokens."""
    return -(-vocab_size // BITS_PER_WORD)


def apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set logits [S, V] of what the masks do not admit to minus infinity, in place.

    ``masks`` int32[N, ceil(V / 32)] belong to ``rows`` int64[N]; the lowest bit of the first word is token 0's.
    """
    if logits.device.type == "cuda":
        from skiff_runtime.kernels.triton.sampling import token_bitmask as bitmask

        bitmask.apply_token_bitmask(logits, rows, masks)
        return
    bits = np.unpackbits((~masks).view(torch.uint8).numpy(), axis=1, bitorder="little")
    refused = torch.from_numpy(bits).view(torch.bool)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(refused, -torch.inf)
