"""Tiles of attention kernels, by what they attend with."""

from typing import Final

import torch

from skiff_runtime.kernels.e4m3 import E4M3

FEW_ROWS: Final = 4
MANY_SPLITS: Final = 4
"""Rows so few, or cut into more parts than these, take smaller tiles."""

Tile = dict[str, int | str]
"""Tokens at a time, precision, warps and stages, by the names that launches have for them."""


def padded_head_dim(dim: int) -> int:
    """A head's numbers, filled up to what a kernel can hold."""
    return max(16, 1 << (dim - 1).bit_length())


def decode_attention_tile(dtype: torch.dtype, cached: torch.dtype, dims: int, splits: int, rows: int) -> Tile:
    """For queries of ``dtype`` over a ``cached`` one, heads of ``dims`` filled up: of the shapes tried on an H200, none was faster in all cases.

    docs/benchmarks.md has the others. For few rows it is a whole step that was timed: a tile with much shared memory is
    faster by itself, but not where it starts beside the kernel ahead.
    """
    if dtype == torch.float32:
        return _exact_tile(dims)
    if dims > 128:
        return _tile(32, warps=4, stages=3)
    if rows > FEW_ROWS and splits <= MANY_SPLITS:
        return _tile(128, warps=4, stages=3)
    return _tile(64, warps=2, stages=3) if cached == E4M3 else _tile(64, warps=4, stages=2)


def shared_prefix_tile(dtype: torch.dtype, dims: int) -> Tile:
    """The same, for rows that read together."""
    if dtype == torch.float32:
        return _exact_tile(dims)
    return _tile(32, warps=4, stages=2) if dims > 128 else _tile(64, warps=4, stages=3)


def _exact_tile(dims: int) -> Tile:
    """For float32, of a size that GPUs with little shared memory have, too."""
    block, stages = (16, 1) if dims > 128 else (32, 2)
    return _tile(block, warps=4, stages=stages, precision="ieee")


def _tile(block: int, *, warps: int, stages: int, precision: str = "tf32") -> Tile:
    return {"BLOCK": block, "PRECISION": precision, "num_warps": warps, "num_stages": stages}
