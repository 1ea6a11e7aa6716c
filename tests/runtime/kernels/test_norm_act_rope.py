"""The kernels of norms, activations and RoPE against float64: odd shapes, strided inputs, every element written."""

import pytest
import torch
import torch.nn.functional as F
from kernel_device import DEVICE, TOLERANCE, error, noise, poison

from skiff_runtime.kernels import qk_norm_rope as reference
from skiff_runtime.kernels.fp8_tensors import E4M3, cast_to_fp8
from skiff_runtime.kernels.triton.attention.qk_norm_rope import qk_norm_rope_store_kv
from skiff_runtime.kernels.triton.norm_act.rms_norm import add_rms_norm, rms_norm
from skiff_runtime.kernels.triton.norm_act.silu_and_mul import silu_and_mul

TYPES = (torch.float32, torch.bfloat16)

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows, width", [(1, 64), (3, 100), (5, 1537)])
def test_rms_norm_with_and_without_residual(rows: int, width: int, dtype: torch.dtype) -> None:
    x = noise(rows, 2 * width, dtype=dtype)[:, :width]
    residual, weight = noise(rows, width, dtype=dtype, seed=1), noise(width, dtype=dtype, seed=2)
    expected_total = x.double() + residual.double()
    normed, total = add_rms_norm(x, residual, weight, 1e-5)
    assert error(total, expected_total) < TOLERANCE[dtype]
    assert error(normed, exact_rms_norm(expected_total, weight)) < TOLERANCE[dtype]
    assert error(rms_norm(x, weight, 1e-5), exact_rms_norm(x.double(), weight)) < TOLERANCE[dtype]
    other = noise(rows, width, dtype=dtype, seed=3)
    found = add_rms_norm(x, residual, weight, 1e-5, other)
    expected = add_rms_norm(x + other, residual, weight, 1e-5)
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":  # Triton's interpreter does not round to nearest
        assert all(error(*pair) < TOLERANCE[dtype] for pair in zip(found, expected, strict=True))
    else:
        assert all(map(torch.equal, found, expected))


def exact_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5) * weight.double()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    for width in (8, 1100):
        x = noise(3, 2 * width, dtype=dtype)
        gate, up = x.double().chunk(2, -1)
        assert error(silu_and_mul(x), F.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("query, kv, dim, normed", [(4, 2, 16, True), (5, 1, 24, False), (3, 3, 64, True)])
def test_qk_norm_rope_and_kv_store_equal_the_reference(
    query: int, kv: int, dim: int, normed: bool, dtype: torch.dtype
) -> None:
    """The reference computes in float64. A padding token is stored nowhere, and no other place of the pool changes."""
    tokens = 5
    qkv = noise(tokens, (query + 2 * kv) * dim, dtype=dtype)
    cos_sin, weights = noise(9, 2, dim, dtype=dtype, seed=3), noise(2, dim, dtype=dtype, seed=4)
    cos_sin = torch.cat((cos_sin[..., : dim // 2], cos_sin[..., : dim // 2]), -1)
    cos_sin[:, 1, : dim // 2] *= -1
    positions = torch.tensor([8, 0, 3, 3, 1], dtype=torch.int32, device=DEVICE)
    slot_mapping = torch.tensor([6, 0, 2, -1, 10], device=DEVICE)
    pool = poison(noise(12, kv, dim, dtype=dtype)), poison(noise(12, kv, dim, dtype=dtype))
    norm_weights = weights if normed else None
    q = qk_norm_rope_store_kv(qkv, cos_sin, positions, norm_weights, 1e-6, pool, slot_mapping)
    stored = slot_mapping >= 0
    exact_pool = tuple(torch.zeros(12, kv, dim, dtype=torch.float64) for _ in range(2))
    expected = reference.qk_norm_rope_store_kv(
        qkv[stored].double().cpu(),
        cos_sin.double().cpu(),
        positions[stored].cpu(),
        None if norm_weights is None else norm_weights.double().cpu(),
        1e-6,
        (exact_pool[0], exact_pool[1]),
        slot_mapping[stored].cpu(),
    )
    assert error(q[stored], expected) < 2 * TOLERANCE[dtype]
    assert torch.isfinite(q).all()
    written = torch.zeros(12, dtype=torch.bool)
    written[slot_mapping[stored].cpu()] = True
    for side, exact in zip(pool, exact_pool, strict=True):
        assert error(side.cpu()[written], exact[written]) < 2 * TOLERANCE[dtype]
        assert torch.isnan(side.cpu()[~written]).all()


def make_hard_to_round(dtype: torch.dtype) -> torch.Tensor:
    """Return all FP8 numbers, the midpoints between them, neighbours of these, too large numbers, and NaN."""
    every = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    midpoints = ((every[1:] + every[:-1]) / 2).to(dtype)
    bits = midpoints.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    large = torch.tensor([450.0, 463.0, 464.0, 466.0, 480.0, 1000.0, 60_000.0, torch.inf])
    numbers = torch.cat(
        (every.to(dtype), midpoints, *((bits + step).view(dtype) for step in (-1, 1)), large.to(dtype))
    )
    return torch.cat((numbers, -numbers, torch.tensor([torch.nan], dtype=dtype)))


@pytest.mark.parametrize("dtype", [*TYPES, torch.float16], ids=str)
def test_fp8_pool_gets_the_nearest_number_and_saturates(dtype: torch.dtype) -> None:
    query, kv, dim = 3, 2, 32
    numbers = make_hard_to_round(dtype)
    tokens = -(-len(numbers) // (kv * dim))
    sides = torch.zeros(2, tokens * kv * dim, dtype=dtype)
    sides[0, : len(numbers)], sides[1, : len(numbers)] = numbers.flip(0), numbers
    # Keys that are not finite would make others of their head NaN, even where the rotation is by zero.
    sides[0][~sides[0].isfinite()] = 0
    k, v = sides.view(2, tokens, kv * dim)
    qkv = torch.cat((torch.ones(tokens, query * dim, dtype=dtype), k, v), 1).to(DEVICE)
    unrotated = torch.tensor([1.0, 0.0], dtype=dtype, device=DEVICE)[:, None].expand(1, 2, dim).contiguous()
    pool = tuple(poison(torch.empty(tokens + 2, kv, dim, dtype=E4M3, device=DEVICE)) for _ in range(2))
    places = torch.randperm(tokens + 2, generator=torch.Generator().manual_seed(tokens))[:tokens]
    positions = torch.zeros(tokens, dtype=torch.int32, device=DEVICE)
    pair = pool[0], pool[1]
    q = qk_norm_rope_store_kv(qkv, unrotated, positions, None, 1e-6, pair, places.to(DEVICE))
    assert (q == 1).all() and q.dtype == dtype
    others = torch.ones(tokens + 2, dtype=torch.bool).index_fill_(0, places, False)
    for side, given in zip(pool, (k, v), strict=True):
        found, expected = side.float().cpu(), cast_to_fp8(given).float().view(tokens, kv, dim)
        torch.testing.assert_close(found[places], expected, rtol=0, atol=0, equal_nan=True)
        assert torch.isnan(found[others]).all()
