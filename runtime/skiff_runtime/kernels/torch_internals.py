"""torch's private interfaces: fake tensors, the scaled FP8 products, the profiler's experimental settings.

No other module imports or calls them.
"""

from typing import Any, Final

import torch

from skiff_runtime.internals import Shape, borrowed

__all__ = [
    "HAS_BLOCK_SCALED_MM",
    "FakeTensor",
    "FakeTensorMode",
    "block_scaled_mm",
    "profiler_settings",
    "scaled_mm",
    "supports_block_scaled_mm",
]

NEEDED: Final[Shape] = {
    "torch._subclasses.fake_tensor:FakeTensor": ("data_ptr",),
    "torch._subclasses.fake_tensor:FakeTensorMode": ("__enter__", "__exit__"),
    "torch:_scaled_mm": (),
    "torch._C._profiler:_ExperimentalConfig": (),
}

with borrowed("torch", NEEDED):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    scaled_mm = torch._scaled_mm
    _ExperimentalConfig: Any = torch._C._profiler._ExperimentalConfig


BLOCK_SCALED_MM_CUDA: Final = (12, 9)
"""The first version of CUDA whose cuBLASLt has the scaling modes of block FP8."""


def supports_block_scaled_mm(cuda_version: str | None) -> bool:
    """Return whether this torch, built for this version of CUDA, multiplies block FP8: torch 2.10 has the function."""
    numbers = (cuda_version or "").split(".")[:2]
    return (
        hasattr(torch.nn.functional, "scaled_mm")
        and all(number.isdecimal() for number in numbers)
        and tuple(map(int, numbers)) >= BLOCK_SCALED_MM_CUDA
    )


HAS_BLOCK_SCALED_MM: Final = supports_block_scaled_mm(torch.version.cuda)


def block_scaled_mm(
    x: torch.Tensor, weight: torch.Tensor, x_scales: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Return x FP8 [T, inputs] times weight FP8 [inputs, outputs] in bfloat16, on compute capability 9.0 only.

    ``x_scales`` float32 [T, groups] with the tokens of a group beside each other, and ``scales`` float32 [padded
    groups, blocks of outputs] with the groups of a block beside each other: cuBLASLt's scaling modes of 128 inputs and
    of 128 x 128, from CUDA 12.9 on.
    """
    functional: Any = torch.nn.functional
    kinds = functional.ScalingType
    product: torch.Tensor = functional.scaled_mm(
        x,
        weight,
        x_scales,
        kinds.BlockWise1x128,
        scales,
        kinds.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return product


def profiler_settings(*, all_threads: bool) -> Any:
    """Return profiler settings that record all threads, or only the one that starts the profile.

    torch has this choice from 2.7 on; earlier versions record the one that starts.
    """
    if "profile_all_threads" not in str(_ExperimentalConfig.__init__.__doc__):
        return _ExperimentalConfig()
    return _ExperimentalConfig(profile_all_threads=all_threads)
