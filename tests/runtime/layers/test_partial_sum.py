"""Partial sums: what a row-parallel layer returns, and norms that complete it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from skiff_runtime.distributed.tensor_parallel import DetachedRank, PendingSum, TensorParallelGroup
from skiff_runtime.kernels.fp8 import quantize_activations
from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.kernels.rms_norm import rms_norm
from skiff_runtime.kernels.tuning import DEFAULT, AllReduceOverlapTuning, overridden
from skiff_runtime.layers.linear import RowParallelLinear, divide_rows
from skiff_runtime.layers.linear_weight import Fp8LinearWeight, UnquantizedLinearWeight
from skiff_runtime.layers.lora import LoraState
from skiff_runtime.layers.norm import QuantizingRMSNorm
from skiff_runtime.layers.partial_sum import PartialProduct, PartialSum, reduce_output
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


class DelayedSum:
    """A sum that is not there until it is waited for, as a kernel on another stream may leave it."""

    def __init__(self, tensor: torch.Tensor, waited: list[int]) -> None:
        self._tensor, self._part, self._waited = tensor, tensor.clone(), waited
        tensor.fill_(torch.nan)

    def wait(self) -> None:
        self._waited.append(len(self._tensor))
        self._tensor.copy_(self._part * 2)


class OverlappingGroup(TwinGroup):
    """Starts sums, and records the rows of each; none may be waited for before all have been started."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[int] = []
        self.waited: list[int] = []

    def _start_sum(self, tensor: torch.Tensor) -> PendingSum:
        assert not self.waited, "the next product would run behind the sum, not beside it"
        self.started.append(len(tensor))
        return DelayedSum(tensor, self.waited)


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
    """Divide products of more than 256 rows."""
    tuning = AllReduceOverlapTuning(max_whole_rows=256, max_chunks=max_chunks, min_chunk_rows=256)
    with overridden(replace(DEFAULT, all_reduce_overlap=tuning)):
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
        (4096, [4096]),
        (4097, [2304, 1793]),
        (6143, [3072, 3071]),
        (6144, [2048, 2048, 2048]),
        (8192, [2048] * 4),
        (10_001, [2560, 2560, 2560, 2321]),
        (16_384, [4096] * 4),
    ],
)
def test_chunks_are_equal_multiples_but_for_the_last(rows: int, sizes: list[int]) -> None:
    tuning = AllReduceOverlapTuning(max_whole_rows=4096, max_chunks=4, min_chunk_rows=2048)
    chunks = divide_rows(rows, tuning)
    assert [each.stop - each.start for each in chunks] == sizes
    assert [each.start for each in chunks] == [0, *(each.stop for each in chunks[:-1])]
    assert divide_rows(rows, replace(tuning, max_chunks=1)) == [slice(0, rows)]


@pytest.mark.parametrize("max_chunks", [2, 4, 8])
@pytest.mark.parametrize("bias", [False, True])
def test_sum_of_many_rows_overlaps_with_the_product(max_chunks: int, bias: bool) -> None:
    group = OverlappingGroup()
    context = LayerContext(torch.float32, CPU, group)
    layer = RowParallelLinear("o_proj", 16, 24, bias=bias, context=context)
    assert layer.weight.unquantized is not None
    weight = layer.weight.unquantized.copy_(noise(24, 8, seed=1))
    if layer.bias is not None:
        layer.bias.copy_(noise(24, seed=2))
    x, residual = noise(2000, 8, seed=3), noise(2000, 24, seed=4)
    with chunks_of_256_rows(max_chunks):
        output = layer(x)
        assert isinstance(layer(x[:256]), PartialSum) and isinstance(layer(x[:511]), PartialSum)
    assert isinstance(output, torch.Tensor) and output.is_contiguous()
    size = {2: 1024, 4: 512, 8: 512}[max_chunks]  # seven chunks would have 286 rows, which is no multiple
    assert group.started == [min(size, 2000 - start) for start in range(0, 2000, size)] and group.sums == 0
    assert group.waited == group.started
    expected = 2 * (x @ weight.T) + (layer.bias if layer.bias is not None else 0)
    torch.testing.assert_close(output, expected)
    norm = QuantizingRMSNorm(24, EPS, context)
    norm.weight.copy_(noise(24, seed=5))
    normed, total = norm.add_and_normalize(output, residual)
    assert group.sums == 0 and isinstance(normed, torch.Tensor)
    torch.testing.assert_close(total, expected + residual)
    torch.testing.assert_close(normed, rms_norm(expected + residual, norm.weight, EPS))


@pytest.mark.parametrize("quantized", [False, True])
def test_sum_of_an_fp8_product_overlaps_with_it(quantized: bool) -> None:
    group = OverlappingGroup()
    context = LayerContext(torch.float32, CPU, group, "fp8")
    layer = RowParallelLinear("o_proj", 64, 32, bias=False, context=context)
    assert isinstance(layer.weight, Fp8LinearWeight)
    layer.weight.matrix.values.copy_(noise(32, 32, seed=1).to(layer.weight.matrix.values.dtype))
    layer.weight.matrix.scales.copy_(noise(32, 1, seed=2).abs())
    x = noise(600, 32, seed=3)
    given = quantize_activations(x) if quantized else x
    whole = layer(given)
    assert isinstance(whole, PartialSum) and not group.started
    with chunks_of_256_rows():
        output = layer(given)
    assert isinstance(output, torch.Tensor) and group.started == [512, 88]
    torch.testing.assert_close(output, whole.reduce())


def test_sum_is_left_to_the_norm_where_it_cannot_overlap() -> None:
    """With 16-bit types on a CPU, a lone rank's shard, and adapters; a step without adapters on the same layer can."""
    x = noise(600, 8, seed=3)
    group = OverlappingGroup()
    with chunks_of_256_rows():
        for dtype, own in ((torch.bfloat16, group), (torch.float32, DetachedRank(0, 2, CPU))):
            layer = RowParallelLinear("o_proj", 16, 24, bias=False, context=LayerContext(dtype, CPU, own))
            assert isinstance(layer(x.to(dtype)), PartialSum)
        state = LoraState(CPU, max_loras=1, max_rank=8, max_tokens=600)
        context = LayerContext(torch.float32, CPU, group, lora=state)
        layer = RowParallelLinear("o_proj", 16, 24, bias=False, context=context)
        state.prepare(torch.full((600,), -1, dtype=torch.int32))
        assert context.has_adapters and isinstance(layer(x), PartialSum) and not group.started
        state.prepare(None)
        assert isinstance(layer(x), torch.Tensor) and group.started == [512, 88]
