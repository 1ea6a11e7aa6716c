"""Gated activations on any device."""

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[T, 2n] -> [T, n]: silu of the first half times the second."""
    if gate_up.device.type == "cuda":
        from skiff_runtime.kernels.triton.norm_act import silu_and_mul as activation

        return activation.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
