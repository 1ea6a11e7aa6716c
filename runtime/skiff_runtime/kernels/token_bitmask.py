"""Token bitmasks: one bit for each token of the vocabulary, as xgrammar fills them, applied to logits on any device."""

import numpy as np
import torch

from skiff_runtime.kernels.constants import BITS_PER_WORD


def bitmask_words(vocab_size: int) -> int:
    """Return the int32 words of a bitmask for ``vocab_size`` tokens."""
    return -(-vocab_size // BITS_PER_WORD)


def apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set logits [S, V] of tokens whose bit is 0 to minus infinity, in place.

    ``masks`` int32 [N, ceil(V / 32)] belong to ``rows`` int64 [N] of the logits; the lowest bit of the first word is
    token 0's.
    """
    if logits.device.type == "cuda":
        from skiff_runtime.kernels.triton.sampling import token_bitmask as kernel

        kernel.apply_token_bitmask(logits, rows, masks)
        return
    bits = np.unpackbits((~masks).view(torch.uint8).numpy(), axis=1, bitorder="little")
    masked = torch.from_numpy(bits).view(torch.bool)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(masked, -torch.inf)
