"""Messages of all-reduce tests, which every rank can compute for all ranks, and their sums in rank order."""

import torch

from skiff_runtime.kernels.rms_norm import rms_norm as reference_rms_norm


def make_message(rank: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return rank ``rank``'s part of message ``number``: numbers of many magnitudes, some -0.0.

    On a CPU bfloat16 holds small integers: Triton's interpreter does not round to it as a GPU does.
    """
    generator = torch.Generator().manual_seed(1000 * number + rank)
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        return torch.randint(-30, 30, shape, generator=generator).to(dtype)
    values = torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-6, 6, shape, generator=generator)
    values[torch.rand(shape, generator=generator) < 0.05] = -0.0
    return values.to(dtype)


def sum_messages(ranks: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of all ranks' parts, in rank order, in float32, rounded once."""
    total = make_message(0, number, shape, dtype).float()
    for rank in range(1, ranks):
        total = total + make_message(rank, number, shape, dtype).float()
    return total.to(dtype)


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors are equal bit for bit: -0.0 differs from 0.0, and NaN may be equal."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[first.itemsize]
    return torch.equal(first.contiguous().view(integers).cpu(), second.contiguous().view(integers).cpu())


def exact_norm(total: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm of rows in float64."""
    return reference_rms_norm(total.double().cpu(), weight.double().cpu(), eps)
