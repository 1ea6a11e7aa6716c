"""The fused kernels of layers against float64: odd shapes, strided inputs, every element written."""

import pytest
import torch
import torch.nn.functional as F
from kernel_device import DEVICE, TOLERANCE, error, poison

from skiff_runtime.kernels import qk_norm_rope as reference
from skiff_runtime.kernels.e4m3 import E4M3, cast_to_fp8
from skiff_runtime.kernels.triton.attention import qk_norm_rope as heads
from skiff_runtime.kernels.triton.norm_act import rms_norm as norm
from skiff_runtime.kernels.triton.norm_act import silu_and_mul as activation

TYPES = (torch.float32, torch.bfloat16)


pytestmark = pytest.mark.usefixtures("poisoned")


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 64), (3, 100), (5, 1537)])
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    x = noise(rows, 2 * width, dtype=dtype)[:, :width]
    residual, weight = noise(rows, width, dtype=dtype, seed=1), noise(width, dtype=dtype, seed=2)
    total = x.double() + residual.double()
    normed, summed = norm.add_rms_norm(x, residual, weight, 1e-5)
    assert error(summed, total) < TOLERANCE[dtype]
    assert error(normed, normalized(total, weight)) < TOLERANCE[dtype]
    assert error(norm.rms_norm(x, weight, 1e-5), normalized(x.double(), weight)) < TOLERANCE[dtype]


def normalized(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5) * weight.double()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    for width in (8, 1100):
        x = noise(3, 2 * width, dtype=dtype)
        gate, up = x.double().chunk(2, -1)
        assert error(activation.silu_and_mul(x), F.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("query, kv, dim, normed", [(4, 2, 16, True), (5, 1, 24, False), (3, 3, 64, True)])
def test_place_heads(query: int, kv: int, dim: int, normed: bool, dtype: torch.dtype) -> None:
    """Against the reference in float64; what belongs to nobody and what is not named stay as they were."""
    tokens = 5
    qkv = noise(tokens, (query + 2 * kv) * dim, dtype=dtype)
    table, weights = noise(9, 2, dim, dtype=dtype, seed=3), noise(2, dim, dtype=dtype, seed=4)
    table = torch.cat((table[..., : dim // 2], table[..., : dim // 2]), -1)
    table[:, 1, : dim // 2] *= -1
    positions = torch.tensor([8, 0, 3, 3, 1], dtype=torch.int32, device=DEVICE)
    slot_mapping = torch.tensor([6, 0, 2, -1, 10], device=DEVICE)
    pool = poison(noise(12, kv, dim, dtype=dtype)), poison(noise(12, kv, dim, dtype=dtype))
    norms = weights if normed else None
    q = heads.qk_norm_rope_store_kv(qkv, table, positions, norms, 1e-6, pool, slot_mapping)
    kept = slot_mapping >= 0
    wide = tuple(torch.zeros(12, kv, dim, dtype=torch.float64) for _ in range(2))
    wanted = reference.qk_norm_rope_store_kv(
        qkv[kept].double().cpu(),
        table.double().cpu(),
        positions[kept].cpu(),
        None if norms is None else norms.double().cpu(),
        1e-6,
        (wide[0], wide[1]),
        slot_mapping[kept].cpu(),
    )
    assert error(q[kept], wanted) < 2 * TOLERANCE[dtype]
    assert torch.isfinite(q).all()
    written = torch.zeros(12, dtype=torch.bool)
    written[slot_mapping[kept].cpu()] = True
    for side, expected in zip(pool, wide, strict=True):
        assert error(side.cpu()[written], expected[written]) < 2 * TOLERANCE[dtype]
        assert torch.isnan(side.cpu()[~written]).all()


def hard_to_round(dtype: torch.dtype) -> torch.Tensor:
    """Every number of e4m3, what is halfway between two of them and right beside that, what is too large, and NaN."""
    every = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    halves = ((every[1:] + every[:-1]) / 2).to(dtype)
    bits = halves.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    large = torch.tensor([450.0, 463.0, 464.0, 466.0, 480.0, 1000.0, 60_000.0, torch.inf])
    numbers = torch.cat(
        (every.to(dtype), halves, *((bits + step).view(dtype) for step in (-1, 1)), large.to(dtype))
    )
    return torch.cat((numbers, -numbers, torch.tensor([torch.nan], dtype=dtype)))


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16], ids=str)
def test_heads_in_eight_bits(dtype: torch.dtype) -> None:
    """Each number of K and V becomes the nearest one of e4m3, and none beyond its largest becomes NaN or another one."""
    query, kv, dim = 3, 2, 32
    numbers = hard_to_round(dtype)
    tokens = -(-len(numbers) // (kv * dim))
    sides = torch.zeros(2, tokens * kv * dim, dtype=dtype)
    sides[0, : len(numbers)], sides[1, : len(numbers)] = numbers.flip(0), numbers
    sides[0][~sides[0].isfinite()] = 0  # which would make others of its head NaN, even where it is not turned
    k, v = sides.view(2, tokens, kv * dim)
    qkv = torch.cat((torch.ones(tokens, query * dim, dtype=dtype), k, v), 1).to(DEVICE)
    unturned = torch.tensor([1.0, 0.0], dtype=dtype, device=DEVICE)[:, None].expand(1, 2, dim).contiguous()
    pool = tuple(poison(torch.empty(tokens + 2, kv, dim, dtype=E4M3, device=DEVICE)) for _ in range(2))
    places = torch.randperm(tokens + 2, generator=torch.Generator().manual_seed(tokens))[:tokens]
    positions = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    q = heads.qk_norm_rope_store_kv(
        qkv, unturned, positions, None, 1e-6, (pool[0], pool[1]), places.to(DEVICE)
    )
    assert (q == 1).all() and q.dtype == dtype
    others = torch.ones(tokens + 2, dtype=torch.bool).index_fill_(0, places, False)
    for side, given in zip(pool, (k, v), strict=True):
        found, wanted = side.float().cpu(), cast_to_fp8(given).float().view(tokens, kv, dim)
        torch.testing.assert_close(found[places], wanted, rtol=0, atol=0, equal_nan=True)
        assert torch.isnan(found[others]).all()
