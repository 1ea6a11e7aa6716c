"""FP8 numbers (e4m3) dequantized in registers, several at a time."""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import FP16_DOWNSCALE
from skiff_runtime.kernels.triton.runtime.device_properties import compute_capability

_FP16_DOWNSCALE = tl.constexpr(FP16_DOWNSCALE)
MIN_CAPABILITY: Final = 89
"""The first compute capability (8.9) that converts two FP8 numbers in one instruction."""


@triton.jit
def dequantize_pairs(pairs: tl.tensor, USE_PTX: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Convert the two FP8 numbers in each int16 to float16; return (the low ones, the high ones).

    So a head of n numbers becomes two of n / 2: those at even indices, and those at odd ones. Numbers loaded as 16
    bits can be transposed for the tensor cores on their way from shared memory, which bytes cannot: 1,337
    instructions instead of 2,217 for a decode attention program, none of them a load of a byte.
    """
    if USE_PTX:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 sorted;
            .reg .b16 lower, upper;
            prmt.b32 sorted, $2, $2, 0x3120;
            mov.b32 {lower, upper}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, lower;
            cvt.rn.f16x2.e4m3x2 $1, upper;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return low, high


@triton.jit
def dot_fp8x8(weights: tl.tensor, x_low: tl.tensor, x_high: tl.tensor, USE_PTX: tl.constexpr) -> tl.tensor:
    """Multiply the eight FP8 numbers in each int64 by the float16 numbers in two int64; return their sums, float32.

    ``x_low`` holds the factors of the first four, ``x_high`` those of the last four. On a GPU, four products each are
    added up in float16, two at a time, and the two sums in float32. Activations come divided by ``FP16_DOWNSCALE``,
    so that no sum in float16 overflows.
    """
    if USE_PTX:
        total = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 w0, w1, x0, x1, x2, x3, first, second, even, odd;
            .reg .b16 lower, upper;
            .reg .f32 left, right;
            mov.b64 {w0, w1}, $1;
            mov.b64 {x0, x1}, $2;
            mov.b64 {x2, x3}, $3;
            mov.b32 {lower, upper}, w0;
            cvt.rn.f16x2.e4m3x2 first, lower;
            cvt.rn.f16x2.e4m3x2 second, upper;
            mul.rn.f16x2 even, first, x0;
            mul.rn.f16x2 odd, second, x1;
            mov.b32 {lower, upper}, w1;
            cvt.rn.f16x2.e4m3x2 first, lower;
            cvt.rn.f16x2.e4m3x2 second, upper;
            fma.rn.f16x2 even, first, x2, even;
            fma.rn.f16x2 odd, second, x3, odd;
            add.rn.f16x2 even, even, odd;
            mov.b32 {lower, upper}, even;
            cvt.f32.f16 left, lower;
            cvt.f32.f16 right, upper;
            add.f32 $0, left, right;
            }
            """,
            "=f,l,l,l",
            [weights, x_low, x_high],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        total = tl.zeros(weights.shape, tl.float32)
        for i in tl.static_range(8):
            halves = x_low if i < 4 else x_high
            weight = (weights >> (8 * i)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
            x = (halves >> (16 * (i % 4))).to(tl.uint16).to(tl.float16, bitcast=True)
            total += weight.to(tl.float32) * x.to(tl.float32)
    return total


@triton.jit
def dequantize_fp8x8(values: tl.tensor, USE_PTX: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Convert the eight FP8 numbers in each int64 to float16, divided by ``FP16_DOWNSCALE``, in two int64.

    These are the factors that ``dot_fp8x8`` takes: (the first four, the last four).
    """
    if USE_PTX:
        low, high = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 w0, w1, first, second, third, fourth, downscale;
            .reg .b16 lower, upper;
            mov.b32 downscale, 0x1C001C00;
            mov.b64 {w0, w1}, $2;
            mov.b32 {lower, upper}, w0;
            cvt.rn.f16x2.e4m3x2 first, lower;
            cvt.rn.f16x2.e4m3x2 second, upper;
            mov.b32 {lower, upper}, w1;
            cvt.rn.f16x2.e4m3x2 third, lower;
            cvt.rn.f16x2.e4m3x2 fourth, upper;
            mul.rn.f16x2 first, first, downscale;
            mul.rn.f16x2 second, second, downscale;
            mul.rn.f16x2 third, third, downscale;
            mul.rn.f16x2 fourth, fourth, downscale;
            mov.b64 $0, {first, second};
            mov.b64 $1, {third, fourth};
            }
            """,
            "=l,=l,l",
            [values],
            dtype=(tl.int64, tl.int64),
            is_pure=True,
            pack=1,
        )
    else:
        low, high = tl.zeros_like(values), tl.zeros_like(values)
        for i in tl.static_range(8):
            value = (values >> (8 * i)).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
            half = (value / _FP16_DOWNSCALE).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.int64)
            if i < 4:
                low |= half << (16 * i)
            else:
                high |= half << (16 * (i - 4))
    return low, high


def supports_fp8_ptx(device: torch.device) -> bool:
    """Return whether kernels on ``device`` may convert FP8 by PTX instructions."""
    return compute_capability(device) >= MIN_CAPABILITY
