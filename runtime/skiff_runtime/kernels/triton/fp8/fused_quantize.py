"""FP8 quantization of activations inside the GEMV that multiplies them, instead of in a launch of its own.

The scale of a row is known when all of the row is, so every program reads and quantizes the whole row again. That is
four instructions an activation, executed while the weights are on their way, against a launch of about a microsecond.
It can pay for a few rows only.

The rules are those of ``quantize_kernel``, so products have the same bits. Activations are quantized eight at a
time, in the form that ``dot_fp8x8`` takes: two int64, each of four two-byte numbers, become two of four float16 numbers,
divided by ``FP16_DOWNSCALE``.
"""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.fp8_tensors import FP8_MAX, FP16_DOWNSCALE

VALUES_PER_THREAD: Final = 64
"""The activations that a thread may keep in registers, as they are, until the scale of their row is known."""
MAX_WARPS: Final = 8
_FP8_MAX = tl.constexpr(FP8_MAX)
_FP16_DOWNSCALE = tl.constexpr(FP16_DOWNSCALE)
UNPACK_BF16_PTX: Final = """
        shl.b32 c, a, 16;
        and.b32 a, a, 0xFFFF0000;
        shl.b32 d, b, 16;
        and.b32 b, b, 0xFFFF0000;
        mov.b32 v0, c;
        mov.b32 v1, a;
        mov.b32 v2, d;
        mov.b32 v3, b;
    """
"""Converts the four bfloat16 numbers in registers a and b to float32 in v0 to v3; overwrites a to d."""


def _quantize_ptx(unpack: str) -> tl.constexpr:
    """Return the PTX of ``quantize_x4``, in which ``unpack`` converts the numbers in a and b to float32 in v0 to v3."""
    return tl.constexpr(
        """
        {
        .reg .b32 a, b, c, d, downscale;
        .reg .b16 h0, h1, h2, h3, lower, upper;
        .reg .f32 v0, v1, v2, v3;
        mov.b32 downscale, 0x1C001C00;
        mov.b64 {a, b}, $1;
        """
        + unpack
        + """
        mul.rn.f32 v0, v0, $2;
        mul.rn.f32 v1, v1, $2;
        mul.rn.f32 v2, v2, $2;
        mul.rn.f32 v3, v3, $2;
        cvt.rn.satfinite.e4m3x2.f32 lower, v1, v0;
        cvt.rn.satfinite.e4m3x2.f32 upper, v3, v2;
        cvt.rn.f16x2.e4m3x2 a, lower;
        cvt.rn.f16x2.e4m3x2 b, upper;
        mul.rn.f16x2 a, a, downscale;
        mul.rn.f16x2 b, b, downscale;
        mov.b64 $0, {a, b};
        }
        """
    )


_QUANTIZE_BF16 = _quantize_ptx(UNPACK_BF16_PTX)
_QUANTIZE_FP16 = _quantize_ptx(
    """
        mov.b32 {h0, h1}, a;
        mov.b32 {h2, h3}, b;
        cvt.f32.f16 v0, h0;
        cvt.f32.f16 v1, h1;
        cvt.f32.f16 v2, h2;
        cvt.f32.f16 v3, h3;
    """
)


@triton.jit
def load_int64(at: tl.tensor, inside: tl.tensor | None) -> tl.tensor:
    """Load what ``at`` points to, and 0 outside of the mask, if there is one."""
    return tl.load(at) if inside is None else tl.load(at, inside, 0)


@triton.jit
def load_x8(x: tl.tensor, at: tl.tensor, inside: tl.tensor | None) -> tuple[tl.tensor, tl.tensor]:
    """Load the eight two-byte numbers at each index of eights: (the first four, the last four) of each in an int64.

    ``x`` points to int64; indices are [RUN] or [RUN, rows], all inside if ``inside`` is ``None``. A thread loads all
    eight numbers at once, 16 bytes; in two loads of eight bytes, with gaps between the threads, a warp would touch every
    cache line twice. Weights that are multiplied with them must be in the same threads: their indices should be made by
    ``arange_for_x8``.
    """
    half = tl.arange(0, 2)
    if len(at.shape) == 1:
        indices = 2 * at[:, None] + half[None, :]
        mask = None if inside is None else inside[:, None] & (half >= 0)[None, :]
        eights = load_int64(x + indices, mask)
    else:
        indices = 2 * at[:, None, :] + half[None, :, None]
        mask = None if inside is None else inside[:, None, :] & (half >= 0)[None, :, None]
        eights = tl.permute(load_int64(x + indices, mask), (0, 2, 1))
    low, high = tl.split(eights)
    return low, high


@triton.jit
def arange_for_x8(RUN: tl.constexpr) -> tl.tensor:
    """Return 0 to RUN - 1, with which neighboring threads load neighboring int64, one each.

    The compiler would give each thread two of them, 16 bytes, and exchange them with those of ``load_x8`` later. In a
    tile of two dimensions these must be the first: without runs in either, it puts threads along the first.
    """
    return tl.max_contiguous(tl.arange(0, RUN), 1)


@triton.jit
def max_abs_x8(low: tl.tensor, high: tl.tensor, DTYPE: tl.constexpr, USE_PTX: tl.constexpr) -> tl.tensor:
    """Return the largest magnitude of the eight numbers of type ``DTYPE`` in two int64, float32."""
    if USE_PTX and tl.bfloat16 == DTYPE:
        largest = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d;
            .reg .f32 first, second;
            mov.b64 {a, b}, $1;
            mov.b64 {c, d}, $2;
            max.xorsign.abs.bf16x2 a, a, b;
            max.xorsign.abs.bf16x2 c, c, d;
            max.xorsign.abs.bf16x2 a, a, c;
            and.b32 b, a, 0x7FFF0000;
            shl.b32 a, a, 16;
            and.b32 a, a, 0x7FFF0000;
            mov.b32 first, a;
            mov.b32 second, b;
            max.f32 $0, first, second;
            }
            """,
            "=f,l,l",
            [low, high],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    elif USE_PTX:
        largest = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d;
            .reg .b16 lower, upper;
            .reg .f32 first, second;
            mov.b64 {a, b}, $1;
            mov.b64 {c, d}, $2;
            max.xorsign.abs.f16x2 a, a, b;
            max.xorsign.abs.f16x2 c, c, d;
            max.xorsign.abs.f16x2 a, a, c;
            and.b32 a, a, 0x7FFF7FFF;
            mov.b32 {lower, upper}, a;
            cvt.f32.f16 first, lower;
            cvt.f32.f16 second, upper;
            max.f32 $0, first, second;
            }
            """,
            "=f,l,l",
            [low, high],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        largest = tl.zeros(low.shape, tl.float32)
        for i in tl.static_range(8):
            values = low if i < 4 else high
            value = (values >> (16 * (i % 4))).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(value))
    return largest


@triton.jit
def quantize_x4(
    values: tl.tensor, reciprocal: tl.tensor, DTYPE: tl.constexpr, USE_PTX: tl.constexpr
) -> tl.tensor:
    """Multiply the four numbers of type ``DTYPE`` in each int64 by ``reciprocal``, 1 / scale, and round them to FP8.

    Return four float16 numbers in an int64: the FP8 numbers, divided by ``FP16_DOWNSCALE``.
    """
    if USE_PTX:
        ASM: tl.constexpr = _QUANTIZE_BF16 if tl.bfloat16 == DTYPE else _QUANTIZE_FP16
        quantized = tl.inline_asm_elementwise(
            ASM, "=l,l,f", [values, reciprocal], dtype=tl.int64, is_pure=True, pack=1
        )
    else:
        quantized = tl.zeros_like(values)
        for i in tl.static_range(4):
            value = (values >> (16 * i)).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32) * reciprocal
            fp8 = tl.minimum(tl.maximum(value, -_FP8_MAX), _FP8_MAX).to(tl.float8e4nv)
            half = (fp8.to(tl.float32) / _FP16_DOWNSCALE).to(tl.float16)
            quantized |= half.to(tl.uint16, bitcast=True).to(tl.int64) << (16 * i)
    return quantized


def choose_warps(values: int) -> int | None:
    """Return the fewest warps of programs that quantize ``values`` activations each; ``None`` if that is too many."""
    warps = triton.next_power_of_2(triton.cdiv(values, 32 * VALUES_PER_THREAD))
    return warps if warps <= MAX_WARPS else None


def supports(dtype: torch.dtype) -> bool:
    """Return whether activations of ``dtype`` can be quantized in registers: those of two bytes."""
    return dtype in (torch.bfloat16, torch.float16)
