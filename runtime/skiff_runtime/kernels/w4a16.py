"""Products of activations in the model's dtype with int4 weights (W4A16), on any device.

Few tokens are as fast as the weight is read: kernels of ours dequantize it in registers. Many are bound by arithmetic,
so a part of the weight is dequantized to memory, multiplied by the library, and overwritten by the next part.
"""

import torch
import torch.nn.functional as F

from skiff_runtime.kernels.constants import DEQUANTIZED_BYTES, INT4_UNIT
from skiff_runtime.kernels.int4_tensors import Int4Weight, dequantize_int4


def int4_linear(x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x [T, inputs] times weight [outputs, inputs] plus bias [outputs]: [T, outputs]."""
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    if x.device.type == "cuda" and weight.outputs:
        from skiff_runtime.kernels.triton.w4a16 import int4_gemm, int4_gemv

        if int4_gemv.is_profitable(x, weight):
            return int4_gemv.int4_gemv(x, weight, bias)
        if int4_gemm.is_profitable(x, weight):
            return int4_gemm.int4_stream_k_gemm(x, weight, bias)
    return dequantize_and_multiply(x, weight, bias)


def dequantize_and_multiply(
    x: torch.Tensor, weight: Int4Weight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply with as many outputs at a time as ``DEQUANTIZED_BYTES`` hold."""
    output = x.new_empty((len(x), weight.outputs))
    rows = max(INT4_UNIT, DEQUANTIZED_BYTES // (weight.inputs * x.element_size()) // INT4_UNIT * INT4_UNIT)
    for first in range(0, weight.outputs, rows):
        part = _slice(weight, first, min(first + rows, weight.outputs))
        added = None if bias is None else bias[first : first + rows]
        product = F.linear(x, dequantize(part, x.dtype), added)
        if part.outputs == weight.outputs:
            return product
        output[:, first : first + rows] = product
    return output


def dequantize(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [outputs, inputs] as numbers of ``dtype``."""
    if weight.words.device.type == "cuda":
        from skiff_runtime.kernels.triton.w4a16 import dequantize as kernel

        return kernel.dequantize_int4(weight, dtype)
    return dequantize_int4(weight, dtype)


def _slice(weight: Int4Weight, first: int, last: int) -> Int4Weight:
    """Return the outputs ``first`` to ``last`` of a weight, as views."""
    if first == 0 and last == weight.outputs:
        return weight
    return Int4Weight(
        weight.words[first:last],
        weight.scales[first:last],
        None if weight.zeros is None else weight.zeros[first:last],
        weight.inputs,
        weight.group_size,
        weight.order,
        weight.tile_counters[first:last],
    )
