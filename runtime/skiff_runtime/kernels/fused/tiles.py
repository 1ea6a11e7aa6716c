"""Tiles of attention kernels, by what they attend with."""

from typing import Final

import torch

from skiff_runtime.kernels.e4m3 import E4M3

FEW_ROWS: Final = 4
"""For which small tiles are the quickest."""


def decode_tiles(
    dtype: torch.dtype, cached: torch.dtype, dim_block: int, splits: int, rows: int
) -> dict[str, int | str]:
    """For queries of ``dtype`` over a ``cached`` one: of the shapes tried on an H200, the fastest.

    docs/benchmarks.md has the others.
    """
    if dtype == torch.float32:
        return {"BLOCK": 32, "PRECISION": "ieee", "num_warps": 4, "num_stages": 2}
    if dim_block > 128:
        return {"BLOCK": 32, "PRECISION": "tf32", "num_warps": 4, "num_stages": 3}
    if rows <= FEW_ROWS:
        return {"BLOCK": 32, "PRECISION": "tf32", "num_warps": 4, "num_stages": 4}
    if cached == E4M3 and splits > 2:
        return {"BLOCK": 64, "PRECISION": "tf32", "num_warps": 2, "num_stages": 3}
    block = 64 if splits > 4 else 128
    return {"BLOCK": block, "PRECISION": "tf32", "num_warps": 4, "num_stages": 3 if splits == 1 else 2}


def prefix_tiles(dtype: torch.dtype, dim_block: int) -> dict[str, int | str]:
    """The same, for rows that read together."""
    if dtype == torch.float32:
        return {"BLOCK": 32, "PRECISION": "ieee", "num_warps": 4, "num_stages": 2}
    small = dim_block > 128
    return {
        "BLOCK": 32 if small else 64,
        "PRECISION": "tf32",
        "num_warps": 4,
        "num_stages": 2 if small else 3,
    }
