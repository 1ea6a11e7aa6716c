"""Checkpoint prefetch: the kernel reads the weights into the page cache while this process imports torch; imports no torch.

Weights are read at the rate of the bus once they are in the page cache, and at that of the disk before. The disk is idle
while a start imports its libraries, so that time is used. Of files that are in the page cache, nothing is read again.
"""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from skiff_runtime.engine.free_memory import host_free_bytes
from skiff_runtime.errors import ModelError
from skiff_runtime.models.checkpoint_files import list_weight_files

RANGE_BYTES: Final = 64 << 20
"""Bytes that are requested at a time."""
MAX_FREE_SHARE: Final = 0.5
"""Most of the host's free memory that prefetched files may fill, over all ranks."""


def prefetch_checkpoint(path: Path, *, tp_rank: int, tp_size: int) -> threading.Thread:
    """Start to prefetch this rank's share of the files: together, the ranks of one host request each file once.

    Errors are left to the loader, which reads the same files.
    """
    files: list[Path] = []
    with suppress(ModelError, OSError):
        files = list_weight_files(path)[tp_rank::tp_size]
    max_bytes = int(host_free_bytes() * MAX_FREE_SHARE) // tp_size
    thread = threading.Thread(
        target=request_files, args=(files, max_bytes), name="checkpoint-prefetch", daemon=True
    )
    thread.start()
    return thread


def request_files(files: Sequence[Path], max_bytes: int) -> int:
    """Request the first ``max_bytes`` of the files' content from the kernel; return how many bytes were requested."""
    left = max_bytes
    for file in files:
        with suppress(OSError):
            left -= _request(file, left)
    return max_bytes - left


def _request(path: Path, max_bytes: int) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = min(os.fstat(handle).st_size, max_bytes)
        for offset in range(0, size, RANGE_BYTES):
            os.posix_fadvise(handle, offset, min(RANGE_BYTES, size - offset), os.POSIX_FADV_WILLNEED)
        return size
    finally:
        os.close(handle)
