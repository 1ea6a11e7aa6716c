"""Int4 weights dequantized: words in registers, and parts of a weight to memory."""

from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.constants import INT4_UNIT, INT4_WORDS
from skiff_runtime.kernels.int4_tensors import SYMMETRIC_ZERO, Int4Weight
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)
from skiff_runtime.kernels.triton.runtime.device_properties import compute_capability
from skiff_runtime.kernels.tuning import tuning_for

MIN_CAPABILITY: Final = 80
"""The first compute capability (8.0) whose tensor cores multiply bfloat16."""
NIBBLES: Final = 8
"""Integers of a word."""
BF16_OFFSET: Final = 128
"""The number by which ``unpack_words`` raises integers in bfloat16, where it is the bits 0x4300."""
FP16_OFFSET: Final = 1024
"""The same in float16, where it is the bits 0x6400."""
_BF16_OFFSET = tl.constexpr(BF16_OFFSET)
_FP16_OFFSET = tl.constexpr(FP16_OFFSET)
_SYMMETRIC_ZERO = tl.constexpr(SYMMETRIC_ZERO)
_UNIT = tl.constexpr(INT4_UNIT)
_WORDS = tl.constexpr(INT4_WORDS)


def _unpack_asm(offset_bits: int) -> str:
    """Return PTX that unpacks two words $8 and $9 to eight pairs, each with ``offset_bits`` set above its four bits."""
    lines = [".reg .b32 low, high, part;", "prmt.b32 low, $8, $9, 0x5410;", "prmt.b32 high, $8, $9, 0x7632;"]
    for nibble in range(NIBBLES):
        half = "low" if nibble < NIBBLES // 2 else "high"
        lines.append(f"shr.u32 part, {half}, {4 * (nibble % (NIBBLES // 2))};")
        lines.append(f"lop3.b32 ${nibble}, part, 0x000f000f, 0x{offset_bits:04x}{offset_bits:04x}, 0xea;")
    return "{" + " ".join(lines) + "}"


_BF16_ASM = tl.constexpr(_unpack_asm(0x4300))
_FP16_ASM = tl.constexpr(_unpack_asm(0x6400))


@triton.jit
def unpack_words(words: tl.tensor, IS_BF16: tl.constexpr, USE_PTX: tl.constexpr) -> tl.tuple:
    """Unpack each int32 to eight numbers, from its lowest four bits on; return eight blocks of its shape.

    They are bfloat16 or float16, raised by ``BF16_OFFSET`` or ``FP16_OFFSET``: an integer below 16 is put into the
    lowest bits of the mantissa of that power of two. Of two adjacent words, two numbers at a time take a shift and a
    logical instruction; a conversion would take one for each and run at a quarter of the rate.
    """
    if USE_PTX:
        if IS_BF16:
            numbers = tl.inline_asm_elementwise(
                _BF16_ASM,
                "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
                [words],
                dtype=(
                    tl.bfloat16,
                    tl.bfloat16,
                    tl.bfloat16,
                    tl.bfloat16,
                    tl.bfloat16,
                    tl.bfloat16,
                    tl.bfloat16,
                    tl.bfloat16,
                ),
                is_pure=True,
                pack=2,
            )
        else:
            numbers = tl.inline_asm_elementwise(
                _FP16_ASM,
                "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
                [words],
                dtype=(
                    tl.float16,
                    tl.float16,
                    tl.float16,
                    tl.float16,
                    tl.float16,
                    tl.float16,
                    tl.float16,
                    tl.float16,
                ),
                is_pure=True,
                pack=2,
            )
    else:
        numbers = (
            _raise_integer(words, 0, IS_BF16),
            _raise_integer(words, 1, IS_BF16),
            _raise_integer(words, 2, IS_BF16),
            _raise_integer(words, 3, IS_BF16),
            _raise_integer(words, 4, IS_BF16),
            _raise_integer(words, 5, IS_BF16),
            _raise_integer(words, 6, IS_BF16),
            _raise_integer(words, 7, IS_BF16),
        )
    return numbers


@triton.jit
def _raise_integer(words: tl.tensor, NIBBLE: tl.constexpr, IS_BF16: tl.constexpr) -> tl.tensor:
    """Return the four bits NIBBLE of each word, raised as ``unpack_words`` does, without PTX."""
    OFFSET: tl.constexpr = _BF16_OFFSET if IS_BF16 else _FP16_OFFSET
    raised = ((words >> (4 * NIBBLE)) & 15) + OFFSET
    return raised.to(tl.bfloat16 if IS_BF16 else tl.float16)


@triton.jit
def load_zero_points(
    zeros: tl.tensor, at: tl.tensor, inside: tl.tensor, HAS_ZEROS: tl.constexpr
) -> tl.tensor:
    """Load zero points float32 at these offsets; without HAS_ZEROS each of them is 8."""
    if HAS_ZEROS:
        points = tl.load(zeros + at, inside, 0.0).to(tl.float32)
    else:
        points = tl.full(at.shape, _SYMMETRIC_ZERO, tl.float32)
    return points


@triton.jit
def dequantize_int4_kernel(
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    output: tl.tensor,
    rows: tl.tensor,
    words_stride: tl.tensor,
    scales_stride: tl.tensor,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Dequantize one unit of 128 inputs of ROWS rows.

    Grid: (runs of ROWS rows, units).

    words               int32 [rows, units * 16], rows ``words_stride`` apart
    scales, zeros       [rows, GROUPS], rows ``scales_stride`` apart; zeros are not read without HAS_ZEROS
    output              [rows, INPUTS], written
    GROUP               the inputs of a group, at most 128; 128 where GROUPS is 1
    """
    launch_dependents(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit, word = tl.program_id(1), tl.arange(0, _WORDS)
    inside = row < rows
    wide_row = row.to(tl.int64)
    packed = tl.load(
        words + wide_row[:, None] * words_stride + unit * _WORDS + word[None, :], inside[:, None], 0
    )
    wait_for_dependencies(PDL)
    for nibble in tl.static_range(8):
        group = unit * (_UNIT // GROUP) + nibble * _WORDS // GROUP if GROUPS > 1 else unit * 0
        known = inside & (group < GROUPS)
        at = wide_row * scales_stride + group
        scale = tl.load(scales + at, known, 0.0).to(tl.float32)
        zero = load_zero_points(zeros, at, known, HAS_ZEROS)
        integers = ((packed >> (4 * nibble)) & 15).to(tl.float32)
        column = unit * _UNIT + nibble * _WORDS + word
        value = (integers - zero[:, None]) * scale[:, None]
        tl.store(
            output + wide_row[:, None] * INPUTS + column[None, :],
            value.to(output.dtype.element_ty),
            inside[:, None] & (column < INPUTS)[None, :],
        )


def dequantize_int4(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [outputs, inputs] as numbers of ``dtype``."""
    rows = weight.outputs
    output = torch.empty((rows, weight.inputs), dtype=dtype, device=weight.words.device)
    block = tuning_for(weight.words.device).w4a16.dequantize_rows
    dequantize_int4_kernel[(triton.cdiv(rows, block), triton.cdiv(weight.inputs, INT4_UNIT))](
        *(weight.words, weight.scales, weight.scales if weight.zeros is None else weight.zeros, output),
        *(rows, weight.words.stride(0), weight.scales.stride(0)),
        INPUTS=weight.inputs,
        GROUP=weight.group_size or INT4_UNIT,
        GROUPS=weight.scales.shape[1],
        HAS_ZEROS=weight.zeros is not None,
        ROWS=block,
        **pdl_options(weight.words.device),
    )
    return output


def supports_int4_ptx(device: torch.device) -> bool:
    """Return whether kernels on ``device`` may unpack integers by PTX instructions."""
    return compute_capability(device) >= MIN_CAPABILITY
