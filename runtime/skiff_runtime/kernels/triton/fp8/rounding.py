"""How a program rounds a row, or a part of one, to e4m3."""

import triton
import triton.language as tl

from skiff_runtime.kernels.e4m3 import FP8_MAX, FP16_DOWNSCALE, MIN_SCALE

_LARGEST = tl.constexpr(FP8_MAX)
_SHRINK = tl.constexpr(FP16_DOWNSCALE)
_SMALLEST_SCALE = tl.constexpr(MIN_SCALE)


@triton.jit
def scale_of(largest: tl.tensor, bound: tl.tensor) -> tl.tensor:
    """With which the largest magnitude of a row, cut at ``bound``, becomes the largest number that e4m3 has."""
    return tl.maximum(tl.div_rn(tl.minimum(largest, bound), _LARGEST), _SMALLEST_SCALE)


@triton.jit
def store(
    value: tl.tensor,
    scale: tl.tensor,
    rounded: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """Columns of a row, rounded with its scale; what float16 takes are e4m3's numbers, made smaller by a power of two."""
    scaled = value * tl.div_rn(1.0, scale)
    scaled = tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)
    short = scaled.to(tl.float8e4nv)
    if rounded.dtype.element_ty == tl.float16:
        short = (short.to(tl.float32) / _SHRINK).to(tl.float16)
    tl.store(rounded + row * WIDTH + columns, short, columns < WIDTH)


@triton.jit
def store_scale(scale: tl.tensor, rounded: tl.tensor, scales: tl.tensor, row: tl.tensor) -> None:
    """The scale of a row, larger by that power where its numbers are smaller."""
    if rounded.dtype.element_ty == tl.float16:
        scale = scale * _SHRINK
    tl.store(scales + row, scale)


@triton.jit
def store_row(
    value: tl.tensor,
    rounded: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    columns: tl.tensor,
    bound: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """A whole row and its scale."""
    scale = scale_of(tl.max(tl.abs(value), 0), bound)
    store(value, scale, rounded, row, columns, WIDTH)
    store_scale(scale, rounded, scales, row)
