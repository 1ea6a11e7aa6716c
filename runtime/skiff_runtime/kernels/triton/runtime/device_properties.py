"""Properties of the GPU that kernels are launched on or, in ahead-of-time compilation, compiled for."""

from functools import cache
from typing import Final

import torch

from skiff_runtime.kernels.triton_internals import drivers

H200_NUM_SMS: Final = 132
H200_SHARED_MEMORY_BYTES: Final = 227 << 10


@cache
def compute_capability(device: torch.device) -> int:
    """Return the compute capability of an NVIDIA GPU, 90 for 9.0; 0 for any other device."""
    if device.type != "cuda":
        return 0
    target = drivers.active.get_current_target()
    return int(target.arch) if target.backend == "cuda" else 0


def has_tensor_memory(device: torch.device) -> bool:
    """Return whether the tensor cores keep their sums in a memory of their own, as those of B200 do, and not in registers."""
    return 100 <= compute_capability(device) < 120


@cache
def max_shared_memory_bytes(device: torch.device) -> int:
    """Return the shared memory that one program may take; that of an H200 where there is no GPU."""
    if device.type != "cuda":
        return H200_SHARED_MEMORY_BYTES
    driver = drivers.active
    return int(driver.utils.get_device_properties(driver.get_current_device())["max_shared_mem"])


@cache
def num_sms(device: torch.device) -> int:
    """Return the number of streaming multiprocessors; that of an H200 where there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H200_NUM_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count
