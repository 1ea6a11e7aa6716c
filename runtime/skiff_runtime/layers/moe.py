"""The sparse block of a mixture of experts: a router, and experts of which each token takes a few.

Experts are sharded over the ranks in one of two ways. With tensor parallelism each rank holds some columns of every
expert; with expert parallelism it holds some experts whole. Either way each rank computes its part of every token's
sum, and one all-reduce adds up the parts. Both rely on tokens that have the same bits on every rank, so that all ranks
choose the same experts.
"""

from collections.abc import Iterator

import torch

from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.kernels.fp8 import Activations
from skiff_runtime.kernels.fp8_tensors import E4M3
from skiff_runtime.kernels.fused_moe import (
    ROUTER_COUNTERS,
    ExpertWeights,
    add_rms_norm_route,
    fused_experts,
    route,
)
from skiff_runtime.layers.linear import ModuleShard, shard_evenly
from skiff_runtime.layers.mlp import MLP
from skiff_runtime.layers.moe_config import MoeConfig
from skiff_runtime.layers.norm import QuantizingRMSNorm
from skiff_runtime.layers.partial_sum import LayerOutput, PartialSum
from skiff_runtime.layers.sharding import LayerContext, StackedTensor, WeightShard, replicated_weight
from skiff_runtime.layers.tensor_converters import ScaleTable, typical_scale
from skiff_runtime.layers.weight_format import Fp8Format


class Router:
    """[T, hidden] -> (weights float32, ids int32) [T, top_k] of each token's experts. Every rank holds it whole.

    It is never quantized: a rounding error there would choose other experts.
    """

    def __init__(self, hidden_size: int, moe: MoeConfig, context: LayerContext) -> None:
        self._top_k = moe.top_k
        self._renormalize = moe.renormalize
        self.weight = context.empty(moe.num_experts, hidden_size)
        self._counters = torch.zeros(ROUTER_COUNTERS, dtype=torch.int32, device=context.device)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(x, self.weight, self._counters, self._top_k, renormalize=self._renormalize)

    def add_normalize_and_route(
        self, norm: QuantizingRMSNorm, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (norm(x + residual), x + residual, weights, ids), where weights and ids are those of the norm."""
        return add_rms_norm_route(
            *(x, residual, norm.weight, norm.eps, self.weight, self._counters, self._top_k),
            renormalize=self._renormalize,
        )

    def weight_shards(self, name: str) -> Iterator[WeightShard]:
        """Yield the checkpoint tensor that fills this layer."""
        yield replicated_weight(f"{name}.weight", self.weight)


class Experts:
    """[T, hidden] with weights and ids [T, top_k] -> [T, hidden]: this rank's part of the sum over each token's experts."""

    def __init__(self, layer: int, hidden_size: int, moe: MoeConfig, context: LayerContext) -> None:
        self._hidden_size = hidden_size
        self._moe = moe
        self._columns, experts = _shard(moe, context)
        inner, count = self._columns.stop - self._columns.start, len(experts)
        shapes = (count, 2 * inner, hidden_size), (count, hidden_size, inner)
        up, down = context.for_projection(layer, "gate_up_proj"), context.for_projection(layer, "down_proj")
        assert up.weight_format == down.weight_format, "a checkpoint excludes both from quantization or none"
        weight_format, device = up.weight_format, context.device
        assert weight_format is None or isinstance(weight_format, Fp8Format), "others are refused before"
        is_block = weight_format is not None and weight_format.scales == "block"
        if is_block:
            _check_blocks(hidden_size, moe.intermediate_size, inner, context.group.tp_size)
        elif weight_format is not None and device.type == "cuda" and (hidden_size % 8 or inner % 8):
            raise ConfigError(
                f"experts in FP8 need sizes that are multiples of 8 on each rank, but one is {hidden_size} x {inner}; use "
                "another --tp, or --expert-parallel"
            )
        dtype = context.dtype if weight_format is None else E4M3
        gate_up, down_matrix = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        gate_up_scales, down_scales = (
            None
            if weight_format is None
            else torch.empty(_scales_shape(shape, is_block=is_block), dtype=torch.float32, device=device)
            for shape in shapes
        )
        self.weights = ExpertWeights(
            gate_up,
            down_matrix,
            gate_up_scales,
            down_scales,
            first_expert=experts.start,
            block_shape=(FP8_BLOCK, FP8_BLOCK) if is_block else None,
        )

    def __call__(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        return fused_experts(x, self.weights, topk_weights, topk_ids)

    def weight_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield the shards of the checkpoint's tensors that fill this rank's experts.

        All matrices of a layer are views made by a few calls, because there are tens of thousands of them.
        """
        weights, moe, columns = self.weights, self._moe, self._columns
        count, hidden, total = moe.num_experts, self._hidden_size, moe.intermediate_size
        inner = columns.stop - columns.start
        # The gate and the up-projection of one expert after another.
        gates_and_ups, downs = weights.gate_up.view(-1, inner, hidden).unbind(0), weights.down.unbind(0)
        outer_scales: tuple[torch.Tensor | None, ...] = (None,) * len(gates_and_ups)
        down_scales: tuple[torch.Tensor | None, ...] = (None,) * len(downs)
        if weights.block_shape is None and weights.gate_up_scales is not None:
            assert weights.down_scales is not None
            outer_scales = weights.gate_up_scales.view(-1, inner, 1).unbind(0)
            down_scales = weights.down_scales.unsqueeze(2).unbind(0)
        stacked_outer = f"{prefix}gate_up_proj", (count, 2 * total, hidden)
        stacked_down = f"{prefix}down_proj", (count, hidden, total)
        for index, down in enumerate(downs):
            expert = weights.first_expert + index
            for number, linear in enumerate((moe.modules.gate, moe.modules.up)):
                yield WeightShard(
                    f"{prefix}{expert}.{linear}.weight",
                    (total, hidden),
                    0,
                    columns.start,
                    columns.stop,
                    gates_and_ups[2 * index + number],
                    outer_scales[2 * index + number],
                    stacked=StackedTensor(*stacked_outer, first_row=(2 * expert + number) * total),
                )
            yield WeightShard(
                f"{prefix}{expert}.{moe.modules.down}.weight",
                (hidden, total),
                1,
                columns.start,
                columns.stop,
                down,
                down_scales[index],
                stacked=StackedTensor(*stacked_down, first_row=expert * hidden),
            )
        if weights.block_shape is not None:
            yield from self._block_scale_shards(prefix)

    def _block_scale_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield the shards of the scales of 128 x 128 blocks."""
        weights, modules = self.weights, self._moe.modules
        assert weights.gate_up_scales is not None and weights.down_scales is not None
        start, stop = self._columns.start // FP8_BLOCK, self._columns.stop // FP8_BLOCK
        hidden, total = self._hidden_size // FP8_BLOCK, self._moe.intermediate_size // FP8_BLOCK
        outer = weights.gate_up_scales.view(-1, stop - start, hidden).unbind(0)
        for index, down in enumerate(weights.down_scales.unbind(0)):
            expert = f"{prefix}{weights.first_expert + index}"
            for name, shape, dim, target in (
                (modules.gate, (total, hidden), 0, outer[2 * index]),
                (modules.up, (total, hidden), 0, outer[2 * index + 1]),
                (modules.down, (hidden, total), 1, down),
            ):
                weight = f"{expert}.{name}.weight"
                yield WeightShard(
                    f"{weight}_scale_inv",
                    shape,
                    dim,
                    start,
                    stop,
                    target,
                    converter=ScaleTable(target, typical_scale(FP8_BLOCK * shape[1])),
                    aliases=(f"{weight}_scale",),
                )


class SparseMoeBlock(MLP):
    """[T, hidden] -> [T, hidden]: the sum over each token's experts of the router's weight times the expert's MLP.

    The router's input must not be quantized, so the norm before it does not quantize, and ``fused_experts`` does.
    """

    def __init__(self, layer: int, hidden_size: int, moe: MoeConfig, context: LayerContext) -> None:
        self.name = moe.modules.block
        self.input_context = context.without_quantization()
        self._modules = moe.modules
        self._group = context.group
        self._router = Router(hidden_size, moe, context)
        self._experts = Experts(layer, hidden_size, moe, context)

    def __call__(self, x: Activations) -> LayerOutput:
        assert isinstance(x, torch.Tensor)
        return self._complete(self._experts(x, *self._router(x)))

    def apply_after_norm(
        self, norm: QuantizingRMSNorm, x: LayerOutput, residual: torch.Tensor
    ) -> tuple[LayerOutput, torch.Tensor]:
        """Let the router normalize tokens that no all-reduce completes."""
        if not isinstance(x, torch.Tensor):
            return super().apply_after_norm(norm, x, residual)
        normed, total, *routing = self._router.add_normalize_and_route(norm, x, residual)
        return self._complete(self._experts(normed, *routing)), total

    def _complete(self, part: torch.Tensor) -> LayerOutput:
        return part if self._group.tp_size == 1 else PartialSum(part, self._group)

    def weight_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield the shards of the checkpoint's tensors that fill this block."""
        yield from self._router.weight_shards(f"{prefix}{self._modules.router}")
        yield from self._experts.weight_shards(f"{prefix}{self._modules.experts}.")


def _scales_shape(shape: tuple[int, int, int], *, is_block: bool) -> tuple[int, ...]:
    """Return the shape of the scales of matrices [experts, outputs, inputs] in FP8."""
    experts, outputs, inputs = shape
    return (experts, outputs // FP8_BLOCK, inputs // FP8_BLOCK) if is_block else (experts, outputs)


def _check_blocks(hidden_size: int, intermediate_size: int, inner: int, tp_size: int) -> None:
    """Raise an error if 128 x 128 blocks of FP8 weights do not divide experts, of which a rank has ``inner`` columns."""
    if hidden_size % FP8_BLOCK or intermediate_size % FP8_BLOCK:
        raise ModelError(
            f"experts in block FP8 need sizes that are multiples of {FP8_BLOCK}, but those of this model are "
            f"{hidden_size} x {intermediate_size}"
        )
    if inner % FP8_BLOCK:
        raise ConfigError(
            f"--tp {tp_size} divides the 128 x 128 blocks of experts, of which each rank has {inner} columns; use "
            "--expert-parallel, or a smaller --tp"
        )


def _shard(moe: MoeConfig, context: LayerContext) -> tuple[ModuleShard, range]:
    """Return the columns of each expert, and the experts, that this rank holds."""
    group = context.group
    if not context.expert_parallel:
        return shard_evenly("experts", moe.intermediate_size, context), range(moe.num_experts)
    share = moe.num_experts // group.tp_size
    whole = ModuleShard("experts", moe.intermediate_size, 0, moe.intermediate_size)
    return whole, range(group.tp_rank * share, (group.tp_rank + 1) * share)
