"""Int4 weights with their scales, and the layout in which all formats of checkpoints are kept.

A row's inputs are cut into units of 128, and a unit is 16 words of int32: word k holds, from its lowest four bits on,
the inputs k, 16 + k, 32 + k to 112 + k. So the same four bits of consecutive words are consecutive inputs: a kernel
that has loaded words needs no shuffle before it multiplies them with a run of activations, and a run of 16 inputs
never crosses a group.
"""

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from skiff_runtime.kernels.constants import INT4_UNIT, INT4_WORDS

PER_WORD: Final = 8
SYMMETRIC_ZERO: Final = 8
"""The zero point of weights that have none of their own."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """A layer's weight [outputs, inputs]: (integer - zero point) * scale, in groups of inputs.

    ``words`` int32 [outputs, padded inputs / 8]; ``scales`` and ``zeros`` [outputs, groups] in the model's dtype, with
    ``zeros`` None where every zero point is 8. ``group_size`` None is one group of all inputs. With ``order`` int32
    [inputs], column i of the weight multiplies activation ``order[i]``. ``tile_counters`` int32 [outputs], all zero,
    belong to the product in flight, so a weight can have one at a time.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    inputs: int
    group_size: int | None
    order: torch.Tensor | None
    tile_counters: torch.Tensor

    @property
    def outputs(self) -> int:
        """The number of rows."""
        return self.words.shape[0]


def pack_int4(integers: torch.Tensor) -> torch.Tensor:
    """Pack integers from 0 to 15, uint8 [n, inputs], to words int32 [n, padded inputs / 8]."""
    rows, inputs = integers.shape
    padded = F.pad(integers, (0, -inputs % INT4_UNIT), value=SYMMETRIC_ZERO)
    units = padded.view(rows, -1, PER_WORD, INT4_WORDS)
    words = units[:, :, 0].int()
    for nibble in range(1, PER_WORD):
        words |= units[:, :, nibble].int() << (4 * nibble)
    return words.flatten(1)


def unpack_int4(words: torch.Tensor, inputs: int) -> torch.Tensor:
    """Unpack words int32 [n, padded inputs / 8] to uint8 [n, inputs]."""
    units = words.view(len(words), -1, INT4_WORDS)
    nibbles = torch.stack([(units >> shift & 15).to(torch.uint8) for shift in range(0, 32, 4)], 2)
    return nibbles.flatten(1)[:, :inputs]


def dequantize_int4(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [outputs, inputs] as numbers of ``dtype``, computed in float32."""
    integers = unpack_int4(weight.words, weight.inputs).float()
    size = weight.group_size or weight.inputs

    def spread(table: torch.Tensor) -> torch.Tensor:
        return table.float().repeat_interleave(size, 1)[:, : weight.inputs]

    zeros = float(SYMMETRIC_ZERO) if weight.zeros is None else spread(weight.zeros)
    return ((integers - zeros) * spread(weight.scales)).to(dtype)
