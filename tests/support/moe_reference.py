"""Experts and float64 references for tests of the kernels of mixture of experts."""

from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from kernel_device import DEVICE, noise

from skiff_runtime.kernels.fp8_tensors import QuantizedActivations, cast_to_fp8, quantize_rows
from skiff_runtime.kernels.fused_moe import ExpertWeights

Format = Literal["model", "fp8", "block_fp8"]
"""Of weights: in the model's dtype, in FP8 with a scale for each output, or with one for each block of 128 x 128."""
BLOCK = 128


def make_experts(
    experts: int, hidden: int, inner: int, dtype: torch.dtype, weight_format: Format = "model", seed: int = 1
) -> ExpertWeights:
    """Return random experts, whose outputs are about as large as their inputs."""
    gate_up = noise(experts, 2 * inner, hidden, dtype=torch.float32, seed=seed) * hidden**-0.5
    down = noise(experts, hidden, inner, dtype=torch.float32, seed=seed + 1) * inner**-0.5
    if weight_format == "model":
        return ExpertWeights(gate_up.to(dtype), down.to(dtype))
    quantize = _quantize_channels if weight_format == "fp8" else _quantize_blocks
    (gate_up, gate_up_scales), (down, down_scales) = quantize(gate_up), quantize(down)
    block_shape = None if weight_format == "fp8" else (BLOCK, BLOCK)
    return ExpertWeights(gate_up, down, gate_up_scales, down_scales, block_shape=block_shape)


def _quantize_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, scales = quantize_rows(weight.view(-1, weight.shape[2]))
    return values.view(weight.shape), scales.view(weight.shape[:2])


def _quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    experts, outputs, inputs = weight.shape
    blocks = weight.view(experts, outputs // BLOCK, BLOCK, inputs // BLOCK, BLOCK)
    scales = blocks.abs().amax((2, 4)) / 448
    values = cast_to_fp8(blocks / scales[:, :, None, :, None])
    return values.view(weight.shape), scales.contiguous()


def take_window(experts: ExpertWeights, first: int, count: int) -> ExpertWeights:
    """Return the experts that one rank of an expert-parallel group holds."""
    parts: dict[str, Any] = {
        name: None if (value := getattr(experts, name)) is None else value[first : first + count].contiguous()
        for name in ("gate_up", "down", "gate_up_scales", "down_scales")
    }
    return replace(experts, first_expert=first, **parts)


def dequantize_weight(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return the weight of one expert, [outputs, inputs], in float64 on the CPU."""
    wide = values.double().cpu()
    if scales is None:
        return wide
    scale = scales.double().cpu()
    if scale.dim() == 1:
        return wide * scale[:, None]
    return wide * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def dequantize_activations(x: torch.Tensor | QuantizedActivations) -> torch.Tensor:
    """Return activations [T, n] in float64 on the CPU."""
    if isinstance(x, torch.Tensor):
        return x.double().cpu()
    values, scales = x.values.double().cpu(), x.scales.double().cpu()
    return values * (scales if scales.shape[1] == 1 else scales.repeat_interleave(BLOCK, 1))


def exact_gate_up(
    x: torch.Tensor | QuantizedActivations, experts: ExpertWeights, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Return silu(gate) * up of each pair, float64 [T * top_k, I]; 0 for experts that are not here."""
    wide = dequantize_activations(x).repeat_interleave(topk_ids.shape[1], 0)
    ids = topk_ids - experts.first_expert
    gate, up = _multiply_pairs(wide, experts.gate_up, experts.gate_up_scales, ids).chunk(2, 1)
    return F.silu(gate) * up


def exact_down(
    x: torch.Tensor | QuantizedActivations, experts: ExpertWeights, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Return the outputs of each pair, before their routing weights, float64 [T * top_k, H]; x is [T * top_k, I]."""
    ids = topk_ids - experts.first_expert
    return _multiply_pairs(dequantize_activations(x), experts.down, experts.down_scales, ids)


def _multiply_pairs(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor
) -> torch.Tensor:
    """Return row p of x times the weight of expert ``ids[p]``, [pairs, outputs]; 0 where it is not here."""
    product = torch.zeros(ids.numel(), weight.shape[1], dtype=torch.float64)
    for expert in torch.unique(ids).tolist():
        if 0 <= expert < len(weight):
            rows = ids.flatten().cpu() == expert
            scale = None if scales is None else scales[expert]
            product[rows] = x[rows] @ dequantize_weight(weight[expert], scale).T
    return product


def exact_experts(
    x: torch.Tensor | QuantizedActivations,
    experts: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sums, float64 [T, H].

    For quantized experts, x and the values between the products are quantized as the kernels do it, these after they
    were rounded to the model's dtype.
    """
    between = exact_gate_up(quantize_exactly(x, experts), experts, topk_ids).to(x.dtype)
    pairs = exact_down(quantize_exactly(between, experts), experts, topk_ids)
    weighted = pairs.view(*topk_ids.shape, -1) * topk_weights.double().cpu()[:, :, None]
    return weighted.sum(1)


def quantize_exactly(
    x: torch.Tensor | QuantizedActivations, experts: ExpertWeights
) -> torch.Tensor | QuantizedActivations:
    """Return x as the experts multiply it: unchanged, or quantized by each token or by each 128 of its values."""
    if experts.gate_up_scales is None or isinstance(x, QuantizedActivations):
        return x
    rows, width = x.shape
    values, scales = quantize_rows(x if experts.block_shape is None else x.reshape(-1, BLOCK))
    return QuantizedActivations(values.view(rows, width), scales.view(rows, -1), x.dtype)


def route(tokens: int, experts: int, top_k: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (topk_weights float32, topk_ids int32) [tokens, top_k] of random logits, on the device."""
    top = noise(tokens, experts, dtype=torch.float32, seed=seed).cpu().softmax(-1).topk(top_k)
    return top.values.to(DEVICE), top.indices.int().to(DEVICE)
