"""The experts' gated MLPs, of few tokens without sorting and of many as grouped products (vLLM: ``fused_experts``).

Launches, in bfloat16 (quantization stands in brackets, and is of FP8 experts):

    few tokens      (quantize), gate_up_gemv, (quantize), down_gemv
    many            (quantize), moe_align_block_size, gate_up, (quantize), down, moe_sum

Of the fewest tokens, the GEMVs quantize what they multiply, but for block FP8.

All buffers have sizes that follow from the numbers of tokens, experts and choices, so both are captured in CUDA graphs.
The tile of a product follows from the mean number of rows of an expert, which is known before.
"""

from dataclasses import replace
from functools import cache
from typing import Final

import torch

from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.kernels.fused_moe import ExpertWeights
from skiff_runtime.kernels.triton.fp8.quantize import quantize_activations
from skiff_runtime.kernels.triton.fp8.quantize_groups import quantize_groups
from skiff_runtime.kernels.triton.moe import expert_gemv, fp8_expert_gemv, grouped_gemm
from skiff_runtime.kernels.triton.moe.moe_align_block_size import moe_align_block_size
from skiff_runtime.kernels.triton.moe.moe_sum import moe_sum
from skiff_runtime.kernels.triton.runtime.device_properties import (
    H200_SHARED_MEMORY_BYTES,
    max_shared_memory_bytes,
)
from skiff_runtime.kernels.tuning import GroupedGemmRule, GroupedGemmTile, tuning_for

EXACT_RULE: Final = GroupedGemmRule(
    None,
    rows=16,
    gate_up=GroupedGemmTile(outputs=32, inputs=32, group=1, warps=4, stages=2),
    down=GroupedGemmTile(outputs=64, inputs=32, group=1, warps=4, stages=2),
)
"""For float32, which is multiplied exactly, without the tensor cores: for parity, not for speed."""
BLOCK_SHAPE: Final = (128, 128)


def fused_experts(
    x: torch.Tensor | QuantizedActivations,
    experts: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Do what ``kernels.fused_moe.fused_experts`` does."""
    _check(experts)
    tokens, top_k = topk_ids.shape
    num_experts, hidden_size = experts.down.shape[:2]
    device = experts.down.device
    if tokens == 0:
        return torch.empty((0, hidden_size), dtype=x.dtype, device=device)
    is_few = expert_gemv.is_profitable(tokens, top_k, num_experts, device)
    if experts.gate_up_scales is not None and isinstance(x, torch.Tensor):
        quantizes = is_few and tokens <= tuning_for(device).moe.quantizing_gate_up_tokens
        if quantizes and fp8_expert_gemv.can_quantize_token(x, experts.gate_up_scales):
            return _multiply_few_fp8(x, experts, topk_weights, topk_ids)
        x = _quantize(x, experts)
    if is_few and isinstance(x, QuantizedActivations):
        return _multiply_few_fp8(x, experts, topk_weights, topk_ids)
    if is_few and isinstance(x, torch.Tensor):
        return _multiply_few(x, experts, topk_weights, topk_ids)
    return _multiply_grouped(x, experts, topk_weights, topk_ids)


def _check(experts: ExpertWeights) -> None:
    """Raise ``ValueError`` for experts that the kernels do not support."""
    if experts.block_shape is None:
        return
    sizes = experts.down.shape[1:]
    if experts.block_shape != BLOCK_SHAPE or any(size % 128 for size in sizes):
        raise ValueError(
            f"experts in FP8 need blocks of 128 x 128 that divide their sizes, not {experts.block_shape} for {sizes}"
        )


def _quantize(x: torch.Tensor, experts: ExpertWeights) -> QuantizedActivations:
    return quantize_activations(x) if experts.block_shape is None else quantize_groups(x)


def _multiply_few(
    x: torch.Tensor, experts: ExpertWeights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    first = experts.first_expert
    inner = expert_gemv.gate_up_gemv(x, experts.gate_up, topk_ids, first_expert=first)
    return expert_gemv.down_gemv(inner, experts.down, topk_weights, topk_ids, first_expert=first)


def _multiply_few_fp8(
    x: torch.Tensor | QuantizedActivations,
    experts: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    assert experts.gate_up_scales is not None and experts.down_scales is not None
    first, (tokens, top_k) = experts.first_expert, topk_ids.shape
    inner = fp8_expert_gemv.fp8_gate_up_gemv(
        x, experts.gate_up, experts.gate_up_scales, topk_ids, first_expert=first
    )
    quantizes = tokens <= tuning_for(inner.device).moe.quantizing_down_tokens
    quantizes = quantizes and fp8_expert_gemv.can_quantize_pairs(inner, top_k, experts.down_scales)
    return fp8_expert_gemv.fp8_down_gemv(
        inner if quantizes else _quantize(inner, experts),
        experts.down,
        experts.down_scales,
        topk_weights,
        topk_ids,
        first_expert=first,
    )


def _multiply_grouped(
    x: torch.Tensor | QuantizedActivations,
    experts: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    (tokens, top_k), device = topk_ids.shape, topk_ids.device
    num_experts, hidden_size, inner_size = experts.down.shape
    window = {"first_expert": experts.first_expert, "experts": num_experts}
    rule = choose_rule(tokens * top_k, experts)
    sorted_pairs = moe_align_block_size(topk_ids, rows=rule.rows, **window)
    inner = torch.empty((tokens * top_k, inner_size), dtype=x.dtype, device=device)
    values, scales = _split(x, experts.gate_up_scales)
    grouped_gemm.gate_up(values, experts.gate_up, scales, sorted_pairs, inner, tile=rule.gate_up)
    activations = inner if scales is None else _quantize(inner, experts)
    values, scales = _split(activations, experts.down_scales)
    weighted = torch.empty((tokens * top_k, hidden_size), dtype=x.dtype, device=device)
    grouped_gemm.down(values, experts.down, scales, topk_weights, sorted_pairs, weighted, tile=rule.down)
    output = torch.empty((tokens, hidden_size), dtype=x.dtype, device=device)
    moe_sum(weighted, topk_ids, output, **window)
    return output


def _split(
    x: torch.Tensor | QuantizedActivations, scales: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return (the values of x, the scales of x and of the weight); no scales if x is not quantized."""
    if isinstance(x, torch.Tensor):
        return x, None
    assert scales is not None
    return x.values, (x.scales, scales)


def choose_rule(pairs: int, experts: ExpertWeights) -> GroupedGemmRule:
    """Return the tiles for ``pairs`` pairs of tokens and experts.

    A rank of several that divide the experts has fewer rows for each than the number of pairs suggests.
    """
    if experts.down.dtype == torch.float32:
        return EXACT_RULE
    device = experts.down.device
    tuning, shared_bytes = tuning_for(device).moe, max_shared_memory_bytes(device)
    rules = tuning.rules
    if experts.gate_up_scales is not None:
        rules = tuning.fp8_rules if experts.block_shape is None else tuning.block_fp8_rules
    mean = pairs / len(experts.down)
    chosen = next(rule for rule in rules if rule.max_rows is None or mean <= rule.max_rows)
    if shared_bytes >= H200_SHARED_MEMORY_BYTES:
        return chosen
    return fit_rule(chosen, experts.down.itemsize, shared_bytes)


@cache
def fit_rule(rule: GroupedGemmRule, itemsize: int, shared_bytes: int) -> GroupedGemmRule:
    """Return a rule that was tuned on an H200 for a GPU whose programs have ``shared_bytes`` of shared memory."""
    return replace(
        rule,
        gate_up=_fit_tile(rule.gate_up, rule.rows + 2 * rule.gate_up.outputs, itemsize, shared_bytes),
        down=_fit_tile(rule.down, rule.rows + rule.down.outputs, itemsize, shared_bytes),
    )


def _fit_tile(tile: GroupedGemmTile, rows: int, itemsize: int, shared_bytes: int) -> GroupedGemmTile:
    """Return the tile with fewer stages, but at least two, and then with fewer inputs, until it fits.

    It loads ``rows`` rows of tokens and weights at a time.
    """
    while tile.stages * tile.inputs * rows * itemsize > shared_bytes:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        else:
            tile = replace(tile, inputs=tile.inputs // 2)
    return tile
