"""Mixture of experts: routing and the experts' products."""

from dataclasses import dataclass

import torch

from skiff_runtime.kernels.fp8_tensors import QuantizedActivations


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one layer's experts from ``first_expert`` on: ``gate_up`` [E, 2 * I, H] and ``down`` [E, H, I].

    In the type of the model, or FP8 with float32 scales: of each output, ``gate_up_scales`` [E, 2 * I] and
    ``down_scales`` [E, H], or of each block of ``block_shape`` (128, 128), [E, 2 * I / 128, H / 128] and
    [E, H / 128, I / 128]. Pairs of a token and an expert that is not here contribute nothing.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_scales: torch.Tensor | None = None
    down_scales: torch.Tensor | None = None
    first_expert: int = 0
    block_shape: tuple[int, int] | None = None


def fused_topk(
    router_logits: torch.Tensor, top_k: int, *, renormalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (topk_weights float32 [T, top_k], topk_ids int32 [T, top_k]) of router_logits float32 [T, E]."""
    from skiff_runtime.kernels.triton.moe import fused_topk as kernel

    return kernel.fused_topk(router_logits, top_k, renormalize=renormalize)


def fused_experts(
    x: torch.Tensor | QuantizedActivations,
    experts: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """Return the weighted sums [T, H] of the experts' outputs for x [T, H]."""
    from skiff_runtime.kernels.triton.moe import fused_experts as kernel

    return kernel.fused_experts(x, experts, topk_weights, topk_ids)
