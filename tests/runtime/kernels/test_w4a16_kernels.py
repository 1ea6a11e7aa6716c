"""The int4 kernels against float64: dequantization, GEMV and stream-K GEMM."""

import pytest
import torch
from kernel_device import DEVICE, HALF, TOLERANCE, combine, error, noise

from skiff_runtime.kernels.int4_tensors import Int4Weight, pack_int4
from skiff_runtime.kernels.triton.w4a16 import int4_gemm
from skiff_runtime.kernels.triton.w4a16.dequantize import dequantize_int4
from skiff_runtime.kernels.triton.w4a16.int4_gemv import int4_gemv
from skiff_runtime.kernels.tuning import Int4GemvTile, StreamKTile

pytestmark = pytest.mark.usefixtures("poisoned")

GROUPS = [(32, 96), (32, 256), (64, 320), (128, 384), (None, 200)]
"""Group sizes and inputs, some of which end inside a unit of 128."""


def make_weight(
    outputs: int, inputs: int, group_size: int | None, *, zeros: bool, dtype: torch.dtype
) -> tuple[Int4Weight, torch.Tensor]:
    """Return a weight of random integers on the device, and what it stands for in float64."""
    generator = torch.Generator().manual_seed(outputs)
    integers = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
    groups = 1 if group_size is None else -(-inputs // group_size)
    scales = (torch.rand((outputs, groups), generator=generator) + 0.5).to(dtype)
    points = torch.randint(0, 16, (outputs, groups), generator=generator).to(dtype)
    size = group_size or inputs
    spread = [each.double().repeat_interleave(size, 1)[:, :inputs] for each in (points, scales)]
    exact = (integers.double() - (spread[0] if zeros else 8.0)) * spread[1]
    weight = Int4Weight(
        words=pack_int4(integers).to(DEVICE),
        scales=scales.to(DEVICE),
        zeros=points.to(DEVICE) if zeros else None,
        inputs=inputs,
        group_size=group_size,
        order=None,
        tile_counters=torch.zeros(outputs, dtype=torch.int32, device=DEVICE),
    )
    return weight, exact.to(DEVICE)


@pytest.mark.parametrize(("groups", "zeros", "dtype"), combine(GROUPS, [False, True], [torch.float32, HALF]))
def test_dequantized_weight_equals_the_definition(
    groups: tuple[int | None, int], zeros: bool, dtype: torch.dtype
) -> None:
    group_size, inputs = groups
    weight, exact = make_weight(70, inputs, group_size, zeros=zeros, dtype=dtype)
    found = dequantize_int4(weight, dtype)
    assert found.dtype == dtype and torch.equal(found, exact.float().to(dtype))


@pytest.mark.parametrize(("groups", "zeros", "dtype"), combine(GROUPS, [False, True], [torch.float32, HALF]))
def test_int4_gemv_equals_the_product(
    groups: tuple[int | None, int], zeros: bool, dtype: torch.dtype
) -> None:
    group_size, inputs = groups
    for outputs, tile, biased in ((7, Int4GemvTile(16, 1), True), (2, Int4GemvTile(256, 2), False)):
        weight, exact = make_weight(outputs, inputs, group_size, zeros=zeros, dtype=dtype)
        x = noise(1, inputs, dtype=dtype)
        bias = noise(outputs, dtype=dtype, seed=2) if biased else None
        expected = x.double() @ exact.T + (0 if bias is None else bias.double())
        found = int4_gemv(x, weight, bias, tile=tile)
        assert found.shape == (1, outputs) and found.dtype == dtype
        assert error(found, expected) < TOLERANCE[dtype]


TILES = [
    StreamKTile(128, stages=2, programs=1),
    StreamKTile(128, stages=3, programs=5),
    StreamKTile(256, stages=2, programs=3),
    StreamKTile(128, stages=2, programs=500),
]
"""One program takes everything; programs share tiles or take several; every program has one block."""


@pytest.mark.parametrize(("tokens", "tile", "bias"), combine([2, 16, 33], TILES, [False, True]))
def test_int4_gemm_equals_the_product_and_leaves_counters_zero(
    tokens: int, tile: StreamKTile, bias: bool
) -> None:
    weight, exact = make_weight(128, 512, 128, zeros=True, dtype=HALF)
    x = noise(tokens, 512, dtype=HALF)
    added = noise(128, dtype=HALF, seed=2) if bias else None
    expected = x.double() @ exact.T + (0 if added is None else added.double())
    for _ in range(2):
        found = int4_gemm.int4_stream_k_gemm(x, weight, added, tile=tile)
        assert found.shape == (tokens, 128) and found.dtype == HALF
        assert error(found, expected) < TOLERANCE[HALF]
        assert not weight.tile_counters.any()


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group_size, inputs", GROUPS)
def test_int4_gemm_of_each_group_size(group_size: int | None, inputs: int, zeros: bool) -> None:
    weight, exact = make_weight(64, inputs, group_size, zeros=zeros, dtype=HALF)
    x = noise(5, inputs, dtype=HALF)
    found = int4_gemm.int4_stream_k_gemm(x, weight, tile=StreamKTile(128, stages=2, programs=2))
    assert error(found, x.double() @ exact.T) < TOLERANCE[HALF]


def test_int4_gemm_is_deterministic() -> None:
    """Whichever program comes last adds the parts of a tile up in the order of the inputs."""
    weight, _ = make_weight(64, 1024, 64, zeros=True, dtype=HALF)
    x, tile = noise(5, 1024, dtype=HALF), StreamKTile(128, stages=2, programs=3)
    first = int4_gemm.int4_stream_k_gemm(x, weight, tile=tile)
    for _ in range(2 if DEVICE.type == "cpu" else 200):
        assert torch.equal(int4_gemm.int4_stream_k_gemm(x, weight, tile=tile), first)


@pytest.mark.parametrize(
    "tokens, outputs, dtype, expected",
    [
        (2, 64, HALF, True),
        (64, 128, HALF, True),
        (65, 128, HALF, False),
        (2, 96, HALF, False),
        (2, 64, torch.float32, False),
    ],
)
def test_int4_gemm_is_profitable_by_shape_and_where_the_gpu_has_room(
    tokens: int, outputs: int, dtype: torch.dtype, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, _ = make_weight(outputs, 256, 128, zeros=False, dtype=HALF)
    x = torch.empty((tokens, 256), dtype=dtype, device=DEVICE)
    for capability, shared, fits in ((90, 227, True), (80, 163, True), (75, 227, False), (120, 50, False)):
        monkeypatch.setattr(int4_gemm, "compute_capability", lambda _, found=capability: found)
        monkeypatch.setattr(int4_gemm, "max_shared_memory_bytes", lambda _, found=shared: found << 10)
        assert int4_gemm.is_profitable(x, weight) is (expected and fits)
