"""RMSNorm (Zhang and Sennrich, 2019), on any device."""

import torch
import torch.nn.functional as F

from skiff_runtime.kernels.lora import LoraExpand


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide x [..., n] by its root mean square along n and multiply it by ``weight``, which broadcasts.

    The mean is taken in float32. Shorter types are rounded before they are weighted, as the models were trained.
    """
    if x.device.type == "cuda" and x.dim() == 2 and weight.dim() == 1:
        from skiff_runtime.kernels.triton.norm_act import rms_norm as kernel

        return kernel.rms_norm(x, weight, eps)
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], eps=eps) * weight
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).to(x.dtype) * weight


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    expand: LoraExpand | None = None,
    other: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (the ``rms_norm`` of the sum, the sum) of x and residual, both [T, n].

    One of ``expand`` and ``other``, contiguous [T, n], may be added to x first. With ``expand``, x may be overwritten; the sum
    with ``other`` is rounded as if it were stored.
    """
    assert expand is None or other is None
    if x.device.type == "cuda":
        if expand is not None:
            from skiff_runtime.kernels.triton.lora.expand_add_rms_norm import expand_add_rms_norm

            return expand_add_rms_norm(x, residual, weight, eps, expand)
        from skiff_runtime.kernels.triton.norm_act import rms_norm as kernel

        return kernel.add_rms_norm(x, residual, weight, eps, other)
    if other is not None:
        x = x + other
    if expand is not None:
        expand.add_to(x)
    total = x + residual
    return rms_norm(total, weight, eps), total
