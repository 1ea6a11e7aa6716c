"""QK-norm, RoPE and the store into the KV cache: all that lies between the QKV product and attention, on any device."""

from dataclasses import dataclass

import torch

from skiff_runtime.kernels.kv_store import store_kv
from skiff_runtime.kernels.lora import LoraExpand
from skiff_runtime.kernels.rms_norm import rms_norm


@dataclass(frozen=True, slots=True)
class RopeInputs:
    """Inputs by which every layer of a step rotates and stores the heads of its T tokens.

    ``cos_sin`` [positions, 2, head_dim] is the table of cosines and sines, ``positions`` int[T] its indices, and
    ``slot_mapping`` int[T] the tokens' offsets in the KV cache.
    """

    cos_sin: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


def qk_norm_rope_store_kv(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    norm_weights: torch.Tensor | None,
    eps: float,
    pool: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    expand: LoraExpand | None = None,
) -> torch.Tensor:
    """Normalize and rotate the query and key heads of qkv, store K and V, and return the queries [T, query heads, d].

    qkv             [T, (query heads + 2 * kv heads) * d]
    cos_sin         [P, 2, d]: cosines and sines of each position, as ``apply_rope`` takes them
    positions       int [T]
    norm_weights    [2, d]: of queries and of keys; None for models without QK-norm
    pool            K and V of one layer, each flat [tokens, kv heads, d]
    slot_mapping    int [T]: the token's place in the pool; on a GPU, K and V of tokens with -1 go nowhere
    expand          is added to qkv first, with q, k and v as its parts; then qkv may be overwritten
    """
    if qkv.device.type == "cuda":
        from skiff_runtime.kernels.triton.attention import qk_norm_rope as kernel

        return kernel.qk_norm_rope_store_kv(
            qkv, cos_sin, positions, norm_weights, eps, pool, slot_mapping, expand
        )
    if expand is not None:
        expand.add_to(qkv)
    kv, dim = pool[0].shape[1:]
    split = qkv.view(qkv.shape[0], -1, dim)
    query = split.shape[1] - 2 * kv
    qk, v = torch.split(split, [query + kv, kv], dim=1)
    if norm_weights is not None:
        qk = rms_norm(qk, norm_weights.repeat_interleave(torch.tensor([query, kv]), dim=0), eps)
    cos, sin = torch.split(cos_sin.index_select(0, positions), 1, dim=1)
    q, k = torch.split(apply_rope(qk, cos, sin), [query, kv], dim=1)
    store_kv(k, v, pool, slot_mapping)
    return q


def apply_rope(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads [T, heads, d] (Su et al., 2021), component i together with i + d / 2 as in GPT-NeoX.

    ``cos`` and ``sin`` [T, 1, d] hold each angle twice, with the first half of the sines negated.
    """
    return heads * cos + heads.roll(heads.shape[-1] // 2, dims=-1) * sin
