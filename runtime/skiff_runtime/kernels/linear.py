"""The product of activations and a weight in the model's own type, on any device."""

import torch
import torch.nn.functional as F


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, late: bool = False
) -> torch.Tensor:
    """Return x [T, inputs] times weight [outputs, inputs] plus bias [outputs]: [T, outputs].

    ``late``: the kernel that is launched next starts only after x is complete; ``add_lora`` makes use of that.

    A product of few tokens is as fast as its weight can be read. With one token the GPU's library is far from that,
    and our own GEMV takes its place.
    """
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.linear import gemv

        if gemv.is_profitable(x, weight):
            return gemv.gemv(x, weight, bias, late=late)
    return F.linear(x, weight, bias)


def linear_into(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write x [T, inputs] times weight [outputs, inputs] into out [T, outputs], by the library."""
    torch.mm(x, weight.T, out=out)


def fused_linear_silu_and_mul(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Return ``silu_and_mul`` of ``linear``, bit for bit, by one kernel; ``None`` where there is none, or no faster one.

    x [T, inputs], weight [2n, inputs] and bias [2n], those of gate before those of up: [T, n].
    """
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.linear import gemv

        if gemv.is_fusion_profitable(x, weight):
            return gemv.gemv_silu_and_mul(x, weight, bias)
    return None
