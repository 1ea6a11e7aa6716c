"""Writes into the paged KV cache, in plain torch."""

import torch

from skiff_runtime.kernels.fp8_tensors import E4M3, cast_to_fp8


def store_kv(
    keys: torch.Tensor,
    values: torch.Tensor,
    pool: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
) -> None:
    """Write keys and values [T, kv_heads, d] to ``slot_mapping`` int64 [T] of a pool [tokens, kv_heads, d].

    An FP8 pool takes them without a scale: magnitudes beyond the largest FP8 number become that.
    """
    for side, given in zip(pool, (keys, values), strict=True):
        if side.dtype == E4M3:  # torch copies FP8 numbers by index as bytes only
            side.view(torch.uint8).index_copy_(0, slot_mapping, cast_to_fp8(given).view(torch.uint8))
        else:
            side.index_copy_(0, slot_mapping, given.to(side.dtype))
