"""B (A x) added by the kernels that read a layer's output next, against float64: norm, SwiGLU, and RoPE with the store."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_device import DEVICE, HALF, TOLERANCE, combine, error, noise, poison

from skiff_runtime.kernels import activation, qk_norm_rope, rms_norm
from skiff_runtime.kernels.lora import LoraExpand, LoraWeights, LoraWorkspace
from skiff_runtime.kernels.triton.attention.qk_norm_rope import qk_norm_rope_store_kv
from skiff_runtime.kernels.triton.lora.expand_add_rms_norm import expand_add_rms_norm
from skiff_runtime.kernels.triton.lora.expand_silu_and_mul import expand_silu_and_mul
from skiff_runtime.kernels.tuning import LoraRule, LoraTile, overridden, tuning_for
from skiff_runtime.step import NO_LORA_SLOT

pytestmark = pytest.mark.usefixtures("poisoned")

TYPES = (torch.float32, HALF)
LORAS = 4
TILES = tuple(LoraTile(rows=rows, chunk=64, inputs=32, outputs=32) for rows in (1, 16, 64))


def make_expand(tokens: int, parts: tuple[int, ...], max_rank: int, dtype: torch.dtype) -> LoraExpand:
    """Make A x of all slots and B. A x beyond the rank of a token's slot, and of other slots, is NaN.

    One slot has nothing for the layer, and some tokens have no slot.
    """
    workspace = LoraWorkspace(DEVICE, max_tokens=tokens, max_loras=LORAS, max_rank=max_rank, has_kernels=True)
    ranks = torch.tensor([max_rank, (max_rank + 1) // 2, 0, 1], dtype=torch.int32, device=DEVICE)
    weights = LoraWeights(
        a=torch.zeros(LORAS, len(parts), max_rank, 16, dtype=dtype, device=DEVICE),
        b=noise(LORAS, sum(parts), max_rank, dtype=dtype, seed=1),
        ranks=ranks,
        part_sizes=parts,
        call_id=workspace.new_call_id(),
    )
    inner = noise(tokens, LORAS * len(parts) * max_rank + 16, dtype=dtype, seed=2)[:, 16:]
    generator = torch.Generator().manual_seed(tokens)
    slots = torch.randint(NO_LORA_SLOT, LORAS, (tokens,), generator=generator, dtype=torch.int32)
    by_slot = inner.view(-1, LORAS, len(parts), max_rank)
    for slot, rank in enumerate(ranks.tolist()):
        by_slot[:, slot, :, rank:] = torch.nan
        by_slot[slots.to(DEVICE) != slot, slot] = torch.nan
    return LoraExpand(inner, weights, workspace.map_tokens(slots.to(DEVICE)))


def expand_exactly(out: torch.Tensor, expand: LoraExpand) -> torch.Tensor:
    """Return the sum in float64 on the CPU, rounded to the type of ``out``, as every kernel rounds it."""
    total, weights = out.double().cpu(), expand.weights
    count, parts, max_rank = weights.a.shape[:3]
    inner = expand.inner.double().cpu().view(-1, count, parts, max_rank)
    for token, slot in enumerate(expand.mapping.slots.tolist()):
        first = 0
        for part, size in enumerate(weights.part_sizes):
            if slot != NO_LORA_SLOT:
                rank = int(weights.ranks[slot])
                b = weights.b[slot, first : first + size, :rank].double().cpu()
                total[token, first : first + size] += b @ inner[token, slot, part, :rank]
            first += size
    return total.to(out.dtype).double()


@pytest.mark.parametrize(
    ("tokens", "max_rank", "dtype", "width"), combine((1, 7, 100), (1, 8, 16, 40, 128), TYPES, (96, 5000))
)
def test_norm_adds_it_before_the_residual(tokens: int, max_rank: int, dtype: torch.dtype, width: int) -> None:
    expand = make_expand(tokens, (width,), max_rank, dtype)
    x = noise(tokens, 2 * width, dtype=dtype, seed=3)[:, :width]
    residual, weight = noise(tokens, width, dtype=dtype, seed=4), noise(width, dtype=dtype, seed=5)
    expected = expand_exactly(x, expand) + residual.double().cpu()
    normed, total = expand_add_rms_norm(x, residual, weight, 1e-5, expand)
    assert error(total, expected) < TOLERANCE[dtype]
    exact = F.rms_norm(expected, (width,), eps=1e-5) * weight.double().cpu()
    assert error(normed, exact) < TOLERANCE[dtype]
    # On a CPU PyTorch does it.
    on_cpu = rms_norm.add_rms_norm(x.cpu(), residual.cpu(), weight.cpu(), 1e-5, to_cpu(expand))
    assert error(on_cpu[0], exact) < TOLERANCE[dtype] and error(on_cpu[1], expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("tokens", "max_rank", "dtype", "width", "tile"),
    combine((1, 7, 100), (1, 8, 16, 40, 128), TYPES, (96, 200), TILES),
)
def test_swiglu_adds_it_to_gate_and_up(
    tokens: int, max_rank: int, dtype: torch.dtype, width: int, tile: LoraTile
) -> None:
    tuning = tuning_for(DEVICE)
    with overridden(replace(tuning, lora=replace(tuning.lora, rules=(LoraRule(None, tile),)))):
        expand = make_expand(tokens, (width, width), max_rank, dtype)
    gate_up = noise(tokens, 2 * width + 16, dtype=dtype, seed=3)[:, : 2 * width]
    gate, up = expand_exactly(gate_up, expand).chunk(2, -1)
    assert error(expand_silu_and_mul(gate_up, expand), F.silu(gate) * up) < 2 * TOLERANCE[dtype]
    on_cpu = activation.silu_and_mul(gate_up.cpu(), to_cpu(expand))
    assert error(on_cpu, F.silu(gate) * up) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("tokens", "max_rank", "dtype", "heads", "normed"),
    combine((1, 7, 100), (1, 8, 16, 40, 128), TYPES, ((4, 2, 16), (5, 1, 24)), (False, True)),
)
def test_rope_adds_it_to_queries_keys_and_values(
    tokens: int, max_rank: int, dtype: torch.dtype, heads: tuple[int, int, int], normed: bool
) -> None:
    query, kv, dim = heads
    expand = make_expand(tokens, (query * dim, kv * dim, kv * dim), max_rank, dtype)
    qkv = noise(tokens, (query + 2 * kv) * dim + 16, dtype=dtype, seed=3)[:, 16:]
    cos_sin, weights = noise(9, 2, dim, dtype=dtype, seed=4), noise(2, dim, dtype=dtype, seed=5)
    cos_sin = torch.cat((cos_sin[..., : dim // 2], cos_sin[..., : dim // 2]), -1)
    cos_sin[:, 1, : dim // 2] *= -1
    positions = torch.arange(tokens, dtype=torch.int32, device=DEVICE) % 9
    slot_mapping = torch.arange(tokens, device=DEVICE)
    norm_weights = weights if normed else None
    expected = qk_norm_rope.qk_norm_rope_store_kv(
        expand_exactly(qkv, expand),
        cos_sin.double().cpu(),
        positions.cpu(),
        None if norm_weights is None else norm_weights.double().cpu(),
        1e-6,
        exact := (torch.zeros(tokens, kv, dim).double(), torch.zeros(tokens, kv, dim).double()),
        slot_mapping.cpu(),
    )
    pool = poison(noise(tokens, kv, dim, dtype=dtype)), poison(noise(tokens, kv, dim, dtype=dtype))
    arguments = (cos_sin, positions, norm_weights, 1e-6, pool, slot_mapping)
    q = qk_norm_rope_store_kv(qkv, *arguments, expand)
    for found, wanted in zip((q, *pool), (expected, *exact), strict=True):
        assert error(found, wanted) < 2 * TOLERANCE[dtype]


def to_cpu(expand: LoraExpand) -> LoraExpand:
    """Return the same on the CPU, without row blocks."""
    weights = expand.weights
    moved = replace(weights, a=weights.a.cpu(), b=weights.b.cpu(), ranks=weights.ranks.cpu())
    mapping = replace(expand.mapping, slots=expand.mapping.slots.cpu(), blocks=None)
    return LoraExpand(expand.inner.cpu(), moved, mapping)
