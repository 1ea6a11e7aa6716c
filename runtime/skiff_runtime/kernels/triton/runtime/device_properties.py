"""What kernels ask of the GPU that they are launched on, or compiled for."""

from functools import cache
from typing import Final

import torch

from skiff_runtime.kernels.triton_internals import drivers

H200_NUM_SMS: Final = 132
H200_SHARED_BYTES: Final = 227 << 10


@cache
def architecture(device: torch.device) -> int:
    """Compute capability of an NVIDIA GPU (90: 9.0); 0 for anything else."""
    if device.type != "cuda":
        return 0
    target = drivers.active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0


@cache
def max_shared_memory_bytes(device: torch.device) -> int:
    """Shared memory that a program may have there; where there is no GPU, what an H200 gives."""
    if device.type != "cuda":
        return H200_SHARED_BYTES
    driver = drivers.active
    return int(driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"])


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; where there is none, those of an H200."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H200_NUM_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
