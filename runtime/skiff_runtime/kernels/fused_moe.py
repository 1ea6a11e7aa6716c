"""Mixture of experts: the choice of each token's experts, and their gated MLPs, on any device.

On a GPU nothing here waits for the device: which experts the tokens chose stays there, and buffers have sizes that
follow from the shapes of the arguments alone. So both functions may be captured in CUDA graphs.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F

from skiff_runtime.kernels.activation import silu_and_mul
from skiff_runtime.kernels.fp8 import (
    Activations,
    multiply_dequantized,
    multiply_dequantized_blocks,
    quantize_activations,
    quantize_grouped_activations,
)
from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.kernels.rms_norm import add_rms_norm

ROUTER_COUNTERS: Final = 16
"""The counters of a router, one for each token of the largest step that is routed by one launch."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The matrices of the experts that one rank holds, E of them: ``first_expert`` to ``first_expert + E - 1``.

    gate_up             [E, 2 * I, H]: the I rows of an expert's gate, then those of its up-projection; in the model's
                        dtype or FP8
    down                [E, H, I], of the same dtype
    gate_up_scales      float32 [E, 2 * I], a scale for each output; None where the matrices are not quantized
    down_scales         float32 [E, H]; likewise
    block_shape         None; or (rows, columns) of the blocks that share a scale, of which there are then
                        [E, 2 * I / rows, H / columns] and [E, H / rows, I / columns]
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None
    first_expert: int = 0
    block_shape: tuple[int, int] | None = None


def compute_router_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x [T, H] times weight [E, H], float32 [T, E].

    The product is not rounded to the model's dtype: a rounded one ties experts, whose choice then differs.
    """
    if x.device.type == "cuda" and x.dtype != torch.float32:
        from skiff_runtime.kernels.triton.linear import gemv

        if gemv.is_profitable(x, weight):
            return gemv.gemv(x, weight, dtype=torch.float32)
        # As a batch of one, because torch's fake tensors, on which kernels are compiled ahead, lack mm with a dtype.
        return torch.bmm(x[None], weight.T[None], out_dtype=torch.float32)[0]
    return F.linear(x.float(), weight.float())


def fused_topk(
    router_logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's ``top_k`` experts by logits float32 [T, E]: (weights float32, ids int32), both [T, top_k].

    The experts are those with the largest logits, in descending order; of equal ones, the lower id comes first. Their
    weights are the softmax over all E logits; with ``renormalize`` they are divided by their sum, which makes them the
    softmax over the chosen logits. Ids are below E whatever the logits are, NaN included.
    """
    if router_logits.device.type == "cuda":
        from skiff_runtime.kernels.triton.moe import fused_topk as kernel

        return kernel.fused_topk(router_logits, top_k, renormalize=renormalize)
    ids = router_logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = router_logits.softmax(-1).gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.int()


def route(
    x: torch.Tensor, weight: torch.Tensor, counters: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``fused_topk`` of ``compute_router_logits``; on a GPU, for few tokens, by one launch.

    ``counters`` int32, as many as ROUTER_COUNTERS and all zero, belong to the launch in flight, so a router can have one
    at a time.
    """
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.moe import router_topk as kernel

        if kernel.is_profitable(x, counters):
            return kernel.router_topk(x, weight, counters, top_k, renormalize=renormalize)
    return fused_topk(compute_router_logits(x, weight), top_k, renormalize=renormalize)


def add_rms_norm_route(
    x: torch.Tensor,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    counters: torch.Tensor,
    top_k: int,
    *,
    renormalize: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (normed, total) of ``add_rms_norm``, and (weights, ids) of ``route`` of the normed tokens."""
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.moe import router_topk as kernel

        if kernel.is_norm_profitable(x, counters):
            return kernel.add_rms_norm_router_topk(
                x, residual, norm_weight, eps, weight, counters, top_k, renormalize=renormalize
            )
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return normed, total, *route(normed, weight, counters, top_k, renormalize=renormalize)


def fused_experts(
    x: Activations, experts: ExpertWeights, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """Return, for each token, the sum of weight * down(silu(gate(x)) * up(x)) over its experts: [T, H].

    x                   [T, H]; activations that are not quantized yet are quantized here if the experts are
    topk_weights        float32 [T, top_k]
    topk_ids            int32 [T, top_k]; experts of other ranks contribute nothing

    The result is in the model's dtype; the sum over experts is taken in float32 and rounded once. Between the two
    products the activations are in the model's dtype, and quantized again, with a scale for each pair of token and
    expert, or for each 128 elements of a pair, where the matrices are.
    """
    if experts.gate_up.device.type == "cuda":
        from skiff_runtime.kernels.triton.moe import fused_experts as kernel

        return kernel.fused_experts(x, experts, topk_weights, topk_ids)
    if experts.gate_up_scales is not None and isinstance(x, torch.Tensor):
        x = _quantize(x, experts)
    total = torch.zeros((len(topk_ids), experts.down.shape[1]), dtype=torch.float32)
    local_ids = topk_ids - experts.first_expert
    # In ascending order, so that a token's sum does not depend on other tokens.
    for index in sorted(set(local_ids.flatten().tolist())):
        if 0 <= index < len(experts.gate_up):
            tokens, choices = torch.where(local_ids == index)
            output = _compute_expert(_select_tokens(x, tokens), experts, index)
            total.index_add_(0, tokens, output.float() * topk_weights[tokens, choices, None])
    return total.to(x.dtype)


def _select_tokens(x: Activations, tokens: torch.Tensor) -> Activations:
    if isinstance(x, torch.Tensor):
        return x[tokens]
    return replace(x, values=x.values[tokens], scales=x.scales[tokens])


def _compute_expert(x: Activations, experts: ExpertWeights, index: int) -> torch.Tensor:
    """Compute the gated MLP of one expert of this rank: [T, H] -> [T, H], in the model's dtype."""
    gate_up, down = experts.gate_up[index], experts.down[index]
    if isinstance(x, torch.Tensor):
        return F.linear(silu_and_mul(F.linear(x, gate_up)), down)
    assert experts.gate_up_scales is not None and experts.down_scales is not None
    multiply = multiply_dequantized if experts.block_shape is None else multiply_dequantized_blocks
    activated = silu_and_mul(multiply(x, gate_up, experts.gate_up_scales[index]))
    return multiply(_quantize(activated, experts), down, experts.down_scales[index])


def _quantize(x: torch.Tensor, experts: ExpertWeights) -> QuantizedActivations:
    """Quantize x [T, n] with a scale for each token, or for each 128 of its elements where weights have blocks."""
    return quantize_activations(x) if experts.block_shape is None else quantize_grouped_activations(x)
