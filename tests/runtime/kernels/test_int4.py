"""Int4 weights: the layout, dequantization, and the product on a CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skiff_runtime.kernels import w4a16
from skiff_runtime.kernels.int4_tensors import Int4Weight, dequantize_int4, pack_int4, unpack_int4


def random_weight(
    outputs: int,
    inputs: int,
    group_size: int | None,
    *,
    zeros: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[Int4Weight, torch.Tensor]:
    """Return a weight of random integers, and what it stands for in float64."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    integers = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
    groups = 1 if group_size is None else -(-inputs // group_size)
    scales = (torch.rand((outputs, groups), generator=generator) + 0.5).to(dtype)
    points = torch.randint(0, 16, (outputs, groups), generator=generator).to(dtype) if zeros else None
    weight = Int4Weight(
        words=pack_int4(integers),
        scales=scales,
        zeros=points,
        inputs=inputs,
        group_size=group_size,
        order=None,
        tile_counters=torch.zeros(outputs, dtype=torch.int32),
    )
    size = group_size or inputs
    exact = torch.empty((outputs, inputs), dtype=torch.float64)
    for column in range(inputs):
        zero = 8.0 if points is None else points[:, column // size].double()
        exact[:, column] = (integers[:, column].double() - zero) * scales[:, column // size].double()
    return weight, exact


@given(st.integers(1, 5), st.integers(1, 300), st.integers(0, 1 << 16))
@settings(max_examples=100)
def test_unpacked_integers_are_those_that_were_packed(rows: int, inputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    integers = torch.randint(0, 16, (rows, inputs), generator=generator).to(torch.uint8)
    words = pack_int4(integers)
    assert words.shape == (rows, -(-inputs // 128) * 16) and words.dtype == torch.int32
    assert torch.equal(unpack_int4(words, inputs), integers)


def test_the_same_bits_of_consecutive_words_are_consecutive_inputs() -> None:
    integers = torch.zeros((1, 256), dtype=torch.uint8)
    integers[0, 128 + 3 * 16 : 128 + 4 * 16] = torch.arange(16)
    words = pack_int4(integers)[0]
    assert words[:16].tolist() == [0] * 16
    assert words[16:].tolist() == [number << 12 for number in range(16)]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group_size, inputs", [(32, 96), (64, 192), (128, 384), (None, 200)])
def test_dequantized_weights_equal_the_definition(group_size: int | None, inputs: int, zeros: bool) -> None:
    weight, exact = random_weight(24, inputs, group_size, zeros=zeros)
    assert torch.equal(dequantize_int4(weight, torch.float32), exact.float())


@pytest.mark.parametrize("bias", [False, True])
def test_product_in_parts_equals_the_product(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, exact = random_weight(300, 256, 64)
    x = torch.randn((5, 256), generator=torch.Generator().manual_seed(1))
    added = torch.randn(300, generator=torch.Generator().manual_seed(2)) if bias else None
    expected = x.double() @ exact.T + (0 if added is None else added.double())
    for limit in (1 << 30, 1):
        monkeypatch.setattr(w4a16, "DEQUANTIZED_BYTES", limit)
        torch.testing.assert_close(
            w4a16.int4_linear(x, weight, added).double(), expected, rtol=1e-4, atol=1e-3
        )


def test_order_permutes_the_activations() -> None:
    weight, exact = random_weight(16, 128, 32)
    order = torch.randperm(128, generator=torch.Generator().manual_seed(3)).to(torch.int32)
    ordered = Int4Weight(weight.words, weight.scales, weight.zeros, 128, 32, order, weight.tile_counters)
    x = torch.randn((3, 128), generator=torch.Generator().manual_seed(1))
    expected = x.double()[:, order] @ exact.T
    torch.testing.assert_close(w4a16.int4_linear(x, ordered).double(), expected, rtol=1e-4, atol=1e-3)
