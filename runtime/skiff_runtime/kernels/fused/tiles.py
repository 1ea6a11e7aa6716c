"""Tiles of attention kernels, by what they attend with."""

from typing import Final

import torch

from skiff_runtime.kernels.e4m3 import E4M3

FEW_ROWS: Final = 4
MANY_SPLITS: Final = 4
"""Rows so few, or cut into more parts than these, take smaller tiles."""


def decode_tiles(
    dtype: torch.dtype, cached: torch.dtype, dim_block: int, splits: int, rows: int
) -> dict[str, int | str]:
    """For queries of ``dtype`` over a ``cached`` one: of the shapes tried on an H200, the fastest.

    docs/benchmarks.md has the others.
    """
    if dtype == torch.float32:
        return _exact(dim_block)
    if dim_block > 128:
        return {"BLOCK": 32, "PRECISION": "tf32", "num_warps": 4, "num_stages": 3}
    if rows <= FEW_ROWS or (cached == E4M3 and splits > MANY_SPLITS):
        return {"BLOCK": 64, "PRECISION": "tf32", "num_warps": 2, "num_stages": 3}
    if splits > MANY_SPLITS:
        return {"BLOCK": 64, "PRECISION": "tf32", "num_warps": 4, "num_stages": 2}
    return {"BLOCK": 128, "PRECISION": "tf32", "num_warps": 4, "num_stages": 3}


def prefix_tiles(dtype: torch.dtype, dim_block: int) -> dict[str, int | str]:
    """The same, for rows that read together."""
    if dtype == torch.float32:
        return _exact(dim_block)
    small = dim_block > 128
    return {
        "BLOCK": 32 if small else 64,
        "PRECISION": "tf32",
        "num_warps": 4,
        "num_stages": 2 if small else 3,
    }


def _exact(dim_block: int) -> dict[str, int | str]:
    """For float32, of a size that GPUs with little shared memory have, too."""
    small = dim_block > 128
    return {
        "BLOCK": 16 if small else 32,
        "PRECISION": "ieee",
        "num_warps": 4,
        "num_stages": 1 if small else 2,
    }
