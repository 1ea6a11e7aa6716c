"""Partial sums: what a row-parallel layer returns, and norms that complete it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from skiff_runtime.distributed.copy_exchange import PendingExchange
from skiff_runtime.distributed.tensor_parallel import DetachedRank, TensorParallelGroup
from skiff_runtime.kernels.fp8 import quantize_activations
from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.kernels.rms_norm import rms_norm
from skiff_runtime.kernels.tuning import DEFAULT, CopyExchangeTuning, overridden
from skiff_runtime.layers.activation_quantizer import GroupQuantizer
from skiff_runtime.layers.linear import RowParallelLinear, divide_rows
from skiff_runtime.layers.linear_weight import Fp8LinearWeight, UnquantizedLinearWeight
from skiff_runtime.layers.lora import LoraState
from skiff_runtime.layers.norm import QuantizingRMSNorm
from skiff_runtime.layers.partial_sum import ExchangedSum, PartialProduct, PartialSum, reduce_output
from skiff_runtime.layers.sharding import LayerContext

CPU = torch.device("cpu")
EPS = 1e-5


class TwinGroup(TensorParallelGroup):
    """Two ranks that always have the same part of a sum; counts the sums."""

    def __init__(self) -> None:
        super().__init__(0, 2, CPU)
        self.sums = 0

    def _sum(self, tensor: torch.Tensor) -> None:
        self.sums += 1
        tensor.mul_(2)


class RecordedExchange(PendingExchange):
    """Takes the rows of a message when they are sent; the other rank has twice as much."""

    def __init__(self, message: torch.Tensor) -> None:
        self._message = message
        self._sent = torch.full_like(message, torch.nan)
        self.sizes: list[int] = []

    def send(self, rows: slice) -> None:
        self._sent[rows] = 2 * self._message[rows]
        self.sizes.append(len(self._message[rows]))

    def finish(self) -> torch.Tensor:
        return self._sent


class ExchangingGroup(TwinGroup):
    """Two ranks that exchange messages of at least ``MIN_BYTES``; the other one's part is twice this one's."""

    MIN_BYTES = 512 * 24 * 4

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: list[RecordedExchange] = []

    def can_exchange(self, nbytes: int, dtype: torch.dtype) -> bool:
        return nbytes >= self.MIN_BYTES

    def start_exchange(self, message: torch.Tensor) -> RecordedExchange:
        self.exchanges.append(RecordedExchange(message))
        return self.exchanges[-1]


class FusingGroup(TwinGroup):
    """Records the fused products, and computes their parts and sums one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.next_matrices: list[torch.Tensor | None] = []

    def can_fuse_linear(self, x: torch.Tensor, matrix: torch.Tensor) -> bool:
        return len(x) == 1

    def linear_all_reduce_add_rms_norm(
        self,
        x: torch.Tensor,
        matrix: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        next_matrix: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.next_matrices.append(next_matrix)
        return self.all_reduce_add_rms_norm(x @ matrix.T, residual, weight, eps)


@contextmanager
def chunks_of_256_rows(max_chunks: int = 4) -> Iterator[None]:
    """Divide products of at least 512 rows."""
    tuning = replace(DEFAULT.copy_exchange, max_chunks=max_chunks, min_chunk_rows=256)
    with overridden(replace(DEFAULT, copy_exchange=tuning)):
        yield


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_row_parallel_layer_of_one_rank_returns_its_output() -> None:
    layer = RowParallelLinear("o_proj", 8, 16, bias=True, context=LayerContext(torch.float32, CPU))
    output = layer(noise(3, 8, seed=0))
    assert isinstance(output, torch.Tensor) and reduce_output(output) is output


@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_layer_of_two_ranks_leaves_the_sum_to_the_norm(bias: bool) -> None:
    group = TwinGroup()
    context = LayerContext(torch.float32, CPU, group)
    layer = RowParallelLinear("o_proj", 16, 24, bias=bias, context=context)
    assert isinstance(layer.weight, UnquantizedLinearWeight)
    weight = layer.weight.values.copy_(noise(24, 8, seed=1))
    if layer.bias is not None:
        layer.bias.copy_(noise(24, seed=2))
    x, residual = noise(3, 8, seed=3), noise(3, 24, seed=4)
    output = layer(x)
    assert isinstance(output, PartialSum) and len(output) == 3 and group.sums == 0
    expected = 2 * (x @ weight.T) + (layer.bias if layer.bias is not None else 0) + residual
    norm = QuantizingRMSNorm(24, EPS, context)
    norm.weight.copy_(noise(24, seed=5))
    normed, total = norm.add_and_normalize(output, residual)
    assert group.sums == 1 and isinstance(normed, torch.Tensor)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(normed, rms_norm(expected, norm.weight, EPS))


def test_product_of_one_token_is_left_to_the_norm() -> None:
    group = FusingGroup()
    context = LayerContext(torch.float32, CPU, group)
    layer = RowParallelLinear("o_proj", 16, 24, bias=False, context=context)
    assert layer.weight.unquantized is not None
    weight = layer.weight.unquantized.copy_(noise(24, 8, seed=1))
    x, residual = noise(1, 8, seed=3), noise(1, 24, seed=4)
    output = layer(x)
    assert isinstance(output, PartialProduct) and len(output) == 1 and group.sums == 0
    assert isinstance(layer(noise(2, 8, seed=3)), PartialSum)
    expected = 2 * (x @ weight.T)
    torch.testing.assert_close(reduce_output(output), expected)
    norm = QuantizingRMSNorm(24, EPS, context)
    norm.weight.copy_(noise(24, seed=5))
    next_matrix = noise(3, 24, seed=6)
    normed, total = norm.add_and_normalize(output, residual, next_matrix)
    assert group.next_matrices == [next_matrix] and isinstance(normed, torch.Tensor)
    torch.testing.assert_close(total, expected + residual)
    torch.testing.assert_close(normed, rms_norm(expected + residual, norm.weight, EPS))
    quantizing = QuantizingRMSNorm(24, EPS, LayerContext(torch.float32, CPU, group, "fp8"))
    quantizing.weight.copy_(norm.weight)
    quantized, total = quantizing.add_and_normalize(output, residual)
    assert isinstance(quantized, QuantizedActivations) and len(group.next_matrices) == 1
    torch.testing.assert_close(total, expected + residual)


@pytest.mark.parametrize(("bias", "weight_format"), [(True, None), (False, "fp8")])
def test_product_with_a_bias_or_a_quantized_weight_is_computed_alone(bias: bool, weight_format: Any) -> None:
    context = LayerContext(torch.float32, CPU, FusingGroup(), weight_format)
    layer = RowParallelLinear("o_proj", 16, 24, bias=bias, context=context)
    assert isinstance(layer(noise(1, 8, seed=3)), PartialSum)


def test_quantizing_norm_completes_a_partial_sum() -> None:
    group = TwinGroup()
    context = LayerContext(torch.float32, CPU, group, "fp8", activation_scale_ub=1.5)
    norm = QuantizingRMSNorm(32, EPS, context)
    norm.weight.copy_(noise(32, seed=5))
    part, residual = noise(3, 32, seed=6), noise(3, 32, seed=7)
    expected_total = 2 * part + residual
    normed, total = norm.add_and_normalize(PartialSum(part, group), residual)
    assert isinstance(normed, QuantizedActivations)
    expected = quantize_activations(rms_norm(expected_total, norm.weight, EPS), 1.5)
    assert torch.equal(total, expected_total)
    assert torch.equal(normed.values.float(), expected.values.float())
    assert torch.equal(normed.scales, expected.scales)


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (0, [0]),
        (1, [1]),
        (1023, [1023]),
        (1024, [512, 512]),
        (1025, [512, 513]),
        (1300, [768, 532]),
        (2048, [1024, 512, 512]),
        (4096, [2048, 1024, 512, 512]),
        (10_001, [5120, 2560, 1280, 1041]),
        (16_384, [8192, 4096, 2048, 2048]),
    ],
)
def test_chunks_are_halves_of_what_remains(rows: int, sizes: list[int]) -> None:
    tuning = CopyExchangeTuning(max_bytes=0, max_chunks=4, min_chunk_rows=512)
    chunks = divide_rows(rows, tuning)
    assert [each.stop - each.start for each in chunks] == sizes
    assert [each.start for each in chunks] == [0, *(each.stop for each in chunks[:-1])]
    assert divide_rows(rows, replace(tuning, max_chunks=1)) == [slice(0, rows)]


@pytest.mark.parametrize("max_chunks", [1, 2, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_many_rows_are_exchanged_in_chunks(max_chunks: int, bias: bool) -> None:
    group = ExchangingGroup()
    context = LayerContext(torch.float32, CPU, group)
    layer = RowParallelLinear("o_proj", 16, 24, bias=bias, context=context)
    assert layer.weight.unquantized is not None
    weight = layer.weight.unquantized.copy_(noise(24, 8, seed=1))
    if layer.bias is not None:
        layer.bias.copy_(noise(24, seed=2))
    x, residual = noise(2000, 8, seed=3), noise(2000, 24, seed=4)
    assert isinstance(layer(x[:511]), PartialSum)
    with chunks_of_256_rows(max_chunks):
        output, again = layer(x), layer(x)
    sizes = {1: [2000], 2: [1024, 976], 8: [1024, 512, 464]}[max_chunks]
    assert [each.sizes for each in group.exchanges] == [sizes] * 2
    assert isinstance(output, ExchangedSum) and len(output) == 2000
    norm = QuantizingRMSNorm(24, EPS, context)
    norm.weight.copy_(noise(24, seed=5))
    normed, total = norm.add_and_normalize(output, residual)
    expected = 3 * (x @ weight.T) + (layer.bias if layer.bias is not None else 0)
    assert group.sums == 0 and isinstance(normed, torch.Tensor)
    torch.testing.assert_close(total, expected + residual)
    torch.testing.assert_close(normed, rms_norm(expected + residual, norm.weight, EPS))
    torch.testing.assert_close(reduce_output(again), expected)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_products_in_fp8_are_exchanged_in_chunks(quantized: bool, bias: bool) -> None:
    group = ExchangingGroup()
    context = LayerContext(torch.float32, CPU, group, "fp8")
    layer = RowParallelLinear("o_proj", 64, 32, bias=bias, context=context)
    assert isinstance(layer.weight, Fp8LinearWeight)
    layer.weight.matrix.values.copy_(noise(32, 32, seed=1).to(layer.weight.matrix.values.dtype))
    layer.weight.matrix.scales.copy_(noise(32, 1, seed=2).abs())
    if layer.bias is not None:
        layer.bias.copy_(noise(32, seed=6))
    x, residual = noise(600, 32, seed=3), noise(600, 32, seed=4)
    given = quantize_activations(x) if quantized else x
    with chunks_of_256_rows():
        output = layer(given)
    assert isinstance(output, ExchangedSum) and group.exchanges[0].sizes == [256, 344]
    bias_row = torch.zeros(32) if layer.bias is None else layer.bias
    expected = 3 * layer.weight.apply(given) + bias_row + residual
    norm = QuantizingRMSNorm(32, EPS, context)
    norm.weight.copy_(noise(32, seed=5))
    normed, total = norm.add_and_normalize(output, residual)
    assert isinstance(normed, QuantizedActivations) and group.sums == 0
    torch.testing.assert_close(total, expected)
    wanted = quantize_activations(rms_norm(total, norm.weight, EPS), math.inf)
    assert torch.equal(normed.values.float(), wanted.values.float())


def test_norm_that_quantizes_groups_adds_the_other_part() -> None:
    part, other, residual, weight = (noise(3, 256, seed=seed) for seed in range(4))
    normed, total = GroupQuantizer().add_rms_norm(part.clone(), residual, weight[0], EPS, other)
    wanted, wanted_total = GroupQuantizer().add_rms_norm(part + other, residual, weight[0], EPS)
    assert torch.equal(total, wanted_total) and torch.equal(normed.values.float(), wanted.values.float())


def test_sum_is_left_to_the_norm_where_nothing_is_exchanged() -> None:
    """By NCCL, a lone rank's shard, and adapters; a step without adapters on the same layer is."""
    x = noise(600, 8, seed=3)
    group = ExchangingGroup()
    for own in (TwinGroup(), DetachedRank(0, 2, CPU)):
        layer = RowParallelLinear("o_proj", 16, 24, bias=False, context=LayerContext(torch.float32, CPU, own))
        assert isinstance(layer(x), PartialSum)
    state = LoraState(CPU, max_loras=1, max_rank=8, max_tokens=600)
    context = LayerContext(torch.float32, CPU, group, lora=state)
    layer = RowParallelLinear("o_proj", 16, 24, bias=False, context=context)
    state.prepare(torch.full((600,), -1, dtype=torch.int32))
    assert context.has_adapters and isinstance(layer(x), PartialSum) and not group.exchanges
    state.prepare(None)
    assert isinstance(layer(x), ExchangedSum)
