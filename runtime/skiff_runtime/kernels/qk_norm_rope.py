"""What lies between the product of query, key and value and attention, on any device.

Heads are normalized where the model does so, rotated by their positions, and keys and values put into the cache.
"""

import torch

from skiff_runtime.kernels.kv_store import store_kv
from skiff_runtime.kernels.rms_norm import rms_norm


def qk_norm_rope_store_kv(
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None,
    eps: float,
    pool: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Store K and V of qkv [T, (query + 2 kv heads) * d]; returns the queries [T, query heads, d].

    ``table`` [P, 2, d] holds cosines and sines of positions, ``positions`` int[T] choose from it. ``weights`` [2, d]
    are the norms of queries and keys, None where there are none. ``pool`` is the flat K and V [tokens, kv heads, d] of
    a layer, ``slot_mapping`` int[T] say where in it.
    """
    if qkv.device.type == "cuda":
        from skiff_runtime.kernels.triton.attention import qk_norm_rope as heads

        return heads.qk_norm_rope_store_kv(qkv, table, positions, weights, eps, pool, slot_mapping)
    kv, dim = pool[0].shape[1:]
    split = qkv.view(qkv.shape[0], -1, dim)
    query = split.shape[1] - 2 * kv
    qk, v = torch.split(split, [query + kv, kv], dim=1)
    if weights is not None:
        qk = rms_norm(qk, weights.repeat_interleave(torch.tensor([query, kv]), dim=0), eps)
    cos, sin = torch.split(table.index_select(0, positions), 1, dim=1)
    q, k = torch.split(rotate(qk, cos, sin), [query, kv], dim=1)
    store_kv(k, v, pool, slot_mapping)
    return q


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [T, heads, d]; component i pairs with i + d/2.

    ``cos`` and ``sin`` [T, 1, d] hold each angle twice, the sine's first half negated.
    """
    return heads * cos + heads.roll(heads.shape[-1] // 2, dims=-1) * sin
