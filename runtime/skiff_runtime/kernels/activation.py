"""Gated activations, on any device."""

import torch
import torch.nn.functional as F

from skiff_runtime.kernels.lora import LoraExpand


def silu_and_mul(gate_up: torch.Tensor, expand: LoraExpand | None = None) -> torch.Tensor:
    """Return silu of the first half of each row times the second half: [T, 2n] -> [T, n].

    ``expand`` is added to gate_up first; then gate_up may be overwritten.
    """
    if gate_up.device.type == "cuda":
        if expand is not None:
            from skiff_runtime.kernels.triton.lora.expand_silu_and_mul import expand_silu_and_mul

            return expand_silu_and_mul(gate_up, expand)
        from skiff_runtime.kernels.triton.norm_act import silu_and_mul as kernel

        return kernel.silu_and_mul(gate_up)
    if expand is not None:
        expand.add_to(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
