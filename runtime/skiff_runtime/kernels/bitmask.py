"""Masks with one bit for each token, applied to logits on any device."""

import torch

_BYTE_BITS = 8


def keep_admitted(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set logits [S, V] of what the masks do not admit to minus infinity, in place.

    ``masks`` int32[N, ceil(V / 32)] belong to ``rows`` int64[N]; the lowest bit of the first word is token 0's.
    """
    shifts = torch.arange(_BYTE_BITS, dtype=torch.uint8, device=masks.device)
    bits = (masks.view(torch.uint8).unsqueeze(-1) >> shifts) & 1
    refused = bits.flatten(1)[:, : logits.shape[1]] == 0
    logits[rows] = logits[rows].masked_fill_(refused, -torch.inf)
