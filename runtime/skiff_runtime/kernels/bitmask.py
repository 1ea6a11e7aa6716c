"""Masks with one bit for each token, applied to logits on any device."""

from typing import Final

import numpy as np
import torch

_BYTE_BITS: Final = 8


def keep_admitted(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set logits [S, V] of what the masks do not admit to minus infinity, in place.

    ``masks`` int32[N, ceil(V / 32)] belong to ``rows`` int64[N]; the lowest bit of the first word is token 0's.
    """
    refused = _bits(~masks)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(refused, -torch.inf)


def _bits(words: torch.Tensor) -> torch.Tensor:
    """int32[N, W] -> bool[N, 32 W], the lowest bit of each word first."""
    octets = words.view(torch.uint8)
    if words.device.type == "cpu":
        unpacked = np.unpackbits(octets.numpy(), axis=1, bitorder="little")
        return torch.from_numpy(unpacked).view(torch.bool)
    shifts = torch.arange(_BYTE_BITS, dtype=torch.uint8, device=words.device)
    return ((octets.unsqueeze(-1) >> shifts) & 1).flatten(1).view(torch.bool)
