"""Memory of all GPUs as the driver reports it, to show that a service that ended has left none behind.

Among the workers of pytest-xdist nothing is checked, because tests of other workers use the same GPUs.
"""

import os
from typing import Final

import torch
from gpus import ON_GPU
from service import wait_until

MIB: Final = 1 << 20
TOLERANCE_MIB: Final = 64
RELEASE_SECONDS: Final = 20.0
"""Time limit for the driver, which frees the memory of a killed process after it has ended its kernels."""


def read_free_mib() -> list[int]:
    """Return the free memory of each GPU in MiB; nothing without GPUs, or beside other workers."""
    if not ON_GPU or "PYTEST_XDIST_WORKER" in os.environ:
        return []
    return [torch.cuda.mem_get_info(index)[0] // MIB for index in range(torch.cuda.device_count())]


def check_released(before: list[int]) -> None:
    """Check that soon each GPU has as much free memory as ``before``."""

    def is_released() -> bool:
        return all(now >= then - TOLERANCE_MIB for now, then in zip(read_free_mib(), before, strict=True))

    wait_until(is_released, RELEASE_SECONDS)
