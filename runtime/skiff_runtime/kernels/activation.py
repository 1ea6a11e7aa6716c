"""Gated activations, on any device."""

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu of the first half of each row times the second half: [T, 2n] -> [T, n]."""
    if gate_up.device.type == "cuda":
        from skiff_runtime.kernels.triton.norm_act import silu_and_mul as kernel

        return kernel.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
