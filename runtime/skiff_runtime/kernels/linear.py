"""The product of activations and a weight matrix, on any device."""

import torch
import torch.nn.functional as F


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, inputs], weight [outputs, inputs], bias [outputs] -> [T, outputs].

    With few tokens a product is as fast as the matrix can be read. With one, the GPU's library is far from that, and
    a kernel of our own takes its place.
    """
    if x.device.type == "cuda":
        from skiff_runtime.kernels.triton.linear import gemv

        if gemv.pays(x, weight):
            return gemv.gemv(x, weight, bias)
    return F.linear(x, weight, bias)
