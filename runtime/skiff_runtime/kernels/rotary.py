"""Rotary position embedding applied to heads, on any device."""

import torch


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, d] by the angles of ``cos`` and ``sin`` [T, 1, d/2]; component i pairs with i + d/2."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
