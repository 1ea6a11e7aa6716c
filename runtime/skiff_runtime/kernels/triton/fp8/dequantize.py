"""Widening of numbers in eight bits, several at a time."""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.triton.runtime.device_properties import architecture

FIRST_ARCHITECTURE: Final = 89
"""The first of NVIDIA's compute capabilities (8.9) that widens e4m3 in one instruction."""


@triton.jit
def dequantize_pairs(pairs: tl.tensor, USE_PTX: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Two e4m3 numbers in each int16 -> (the lower ones, the upper ones) in float16.

    A row of n numbers so becomes two of n / 2: those at even places, and those at odd ones. For what is loaded in 16 bits
    can be transposed for the tensor cores on its way from shared memory, and bytes cannot.
    """
    if USE_PTX:
        lower, upper = tl.inline_asm_elementwise(
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
        lower = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        upper = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return lower, upper


@triton.jit
def dot_fp8x8(numbers: tl.tensor, some: tl.tensor, more: tl.tensor, USE_PTX: tl.constexpr) -> tl.tensor:
    """Eight e4m3 numbers in each int64, times four float16 numbers in each of two: their sums in float32.

    Of the eight products, each four are added up in float16, then the two sums in float32.
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
            [numbers, some, more],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        total = tl.zeros(numbers.shape, tl.float32)
        for place in tl.static_range(8):
            halves = some if place < 4 else more
            number = (numbers >> (8 * place)).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
            half = (halves >> (16 * (place % 4))).to(tl.uint16).to(tl.float16, bitcast=True)
            total += number.to(tl.float32) * half.to(tl.float32)
    return total


def supports_fp8_ptx(device: torch.device) -> bool:
    """Whether a GPU's own instructions may be used there."""
    return architecture(device) >= FIRST_ARCHITECTURE
