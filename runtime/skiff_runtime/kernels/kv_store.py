"""Writes into the paged KV cache, on any device."""

import torch

from skiff_runtime.kernels.e4m3 import E4M3, cast_to_fp8


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
) -> None:
    """Put keys and values [T, kv_heads, d] at ``slot_mapping`` int64[T] of the pool's flat [tokens, kv_heads, d].

    A pool in e4m3 takes them as they are, with no scale: what is beyond its largest number becomes that.
    """
    for side, given in zip(pool, (keys, values), strict=True):
        if side.dtype == E4M3:  # of which torch can copy bytes only
            side.view(torch.uint8).index_copy_(0, slot_mapping, cast_to_fp8(given).view(torch.uint8))
        else:
            side.index_copy_(0, slot_mapping, given.to(side.dtype))
