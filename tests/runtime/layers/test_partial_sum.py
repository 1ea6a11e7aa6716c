"""Partial sums: what a row-parallel layer returns, and norms that complete it."""

from typing import Any

import pytest
import torch

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.kernels.fp8 import quantize_activations
from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.kernels.rms_norm import rms_norm
from skiff_runtime.layers.linear import RowParallelLinear
from skiff_runtime.layers.linear_weight import UnquantizedLinearWeight
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
