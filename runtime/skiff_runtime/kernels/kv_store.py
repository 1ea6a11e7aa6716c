"""Writes into the paged KV cache, on any device."""

import torch


def store_kv(
    keys: torch.Tensor, values: torch.Tensor, pool: tuple[torch.Tensor, torch.Tensor], locations: torch.Tensor
) -> None:
    """Put keys and values [T, kv_heads, d] at ``locations`` int64[T] of the pool's flat [tokens, kv_heads, d]."""
    pool[0].index_copy_(0, locations, keys)
    pool[1].index_copy_(0, locations, values)
