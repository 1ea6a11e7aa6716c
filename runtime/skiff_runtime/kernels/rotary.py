"""Rotary position embedding applied to heads, on any device."""

import torch


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, d]; component i pairs with i + d/2.

    ``cos`` and ``sin`` [T, 1, d] hold each angle twice, the sine's first half negated.
    """
    return heads * cos + heads.roll(heads.shape[-1] // 2, dims=-1) * sin
