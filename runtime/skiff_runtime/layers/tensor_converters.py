"""Converters of the tensors of quantized checkpoints: scales, zero points and packed integers of each format.

Compressed-tensors packs eight consecutive inputs of an output into a word of int32, AutoAWQ eight consecutive outputs
of an input, and GPTQ eight consecutive inputs, but lays words of one input out beside each other. In all of them the
first of the eight is in the lowest four bits, except for AutoAWQ's order (``_AWQ_ORDER``). All become the layout of
``kernels.int4_tensors``.
"""

from typing import Final

import torch

from skiff_runtime.errors import ModelError
from skiff_runtime.kernels.constants import INT4_UNIT
from skiff_runtime.kernels.fp8_tensors import FP8_MAX
from skiff_runtime.kernels.int4_tensors import PER_WORD, SYMMETRIC_ZERO, pack_int4
from skiff_runtime.layers.sharding import TensorConverter

_SCALE_DTYPES: Final = ("F32", "BF16", "F16")
_WORD_DTYPES: Final = ("I32",)
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""The four bits, counted from the lowest, that hold each of eight consecutive outputs."""


class ScalarScale(TensorConverter):
    """A scale of a whole module -> ``target`` float32 of any shape, filled with it."""

    dtypes = _SCALE_DTYPES

    def __init__(self, target: torch.Tensor, typical: float) -> None:
        self._target, self._typical = target, typical

    def store(self, values: torch.Tensor, first: int) -> None:
        self._target.copy_(values.float().flatten().expand(self._target.numel()).view_as(self._target))

    def randomize(self, generator: torch.Generator) -> None:
        self._target.fill_(self._typical)


class ScaleTable(TensorConverter):
    """Scales [rows, columns] -> the first columns of ``target`` of any dtype; with ``transposed``, its first rows."""

    dtypes = _SCALE_DTYPES

    def __init__(self, target: torch.Tensor, typical: float, *, transposed: bool = False) -> None:
        self._target, self._typical = target.T if transposed else target, typical

    def store(self, values: torch.Tensor, first: int) -> None:
        rows, columns = values.shape
        self._target[first : first + rows, :columns].copy_(values)

    def randomize(self, generator: torch.Generator) -> None:
        self._target.fill_(self._typical)


class _Words(TensorConverter):
    """Base of packed integers -> ``target`` int32 [outputs, padded inputs / 8]."""

    dtypes = _WORD_DTYPES

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def randomize(self, generator: torch.Generator) -> None:
        self._target.random_(-(1 << 31), 1 << 31, generator=generator)


class CompressedWords(_Words):
    """Words [outputs, inputs / 8] of compressed-tensors."""

    def __init__(self, target: torch.Tensor, inputs: int) -> None:
        super().__init__(target)
        self._inputs = inputs

    def store(self, values: torch.Tensor, first: int) -> None:
        integers = _unpack(values).flatten(1)[:, : self._inputs]
        self._target[first : first + len(values)].copy_(pack_int4(integers))


class AwqWords(_Words):
    """Words [inputs, outputs / 8] of AutoAWQ."""

    rows_multiple = INT4_UNIT

    def store(self, values: torch.Tensor, first: int) -> None:
        words = pack_int4(_unpack_awq(values).T.contiguous())
        self._target[:, first // PER_WORD : first // PER_WORD + words.shape[1]].copy_(words)


class GptqWords(_Words):
    """Words [inputs / 8, outputs] of GPTQ; their inputs are sorted by group as in row ``part`` of ``orders``, if given.

    ``orders`` int32 [parts, inputs] is loaded before.
    """

    rows_multiple = INT4_UNIT // PER_WORD

    def __init__(self, target: torch.Tensor, orders: torch.Tensor | None, part: int, name: str) -> None:
        super().__init__(target)
        self._orders, self._part, self._name = orders, part, name
        if orders is not None:
            self.rows_multiple = 0

    def store(self, values: torch.Tensor, first: int) -> None:
        integers = _unpack(values).permute(0, 2, 1).flatten(0, 1).T
        if self._orders is not None:
            order = self._orders[self._part]
            if not torch.equal(order, self._orders[0]):
                raise ModelError(
                    f"tensor {self._name!r} differs from that of another module of the same matrix, which is not "
                    "supported: its activations can be in one order only"
                )
            integers = integers[:, order]
        words = pack_int4(integers.contiguous())
        self._target[:, first : first + words.shape[1]].copy_(words)


class ZeroPoints(TensorConverter):
    """Packed zero points of ``packing`` -> ``target`` [outputs, groups], or nothing if all of them are 8.

    ``offset`` is added to a stored number, modulo 16. Raises ``ModelError`` where the target is ``None`` and a zero
    point is not 8.
    """

    dtypes = _WORD_DTYPES

    def __init__(self, target: torch.Tensor | None, packing: str, offset: int, name: str) -> None:
        self._target, self._packing, self._offset, self._name = target, packing, offset, name

    def store(self, values: torch.Tensor, first: int) -> None:
        if self._packing == "compressed-tensors":  # [outputs / 8, groups]
            zeros, row, column = _unpack(values).permute(0, 2, 1).flatten(0, 1), PER_WORD * first, 0
        else:  # [groups, outputs / 8]
            unpacked = _unpack_awq(values) if self._packing == "awq" else _unpack(values).flatten(1)
            zeros, row, column = unpacked.T, 0, first
        zeros = zeros + self._offset & 15
        if self._target is None:
            if bool((zeros != SYMMETRIC_ZERO).any()):
                raise ModelError(
                    f"tensor {self._name!r} contains zero points other than 8, but config.json says 'sym'"
                )
            return
        # A whole number of words may hold more zero points than there are outputs.
        part = self._target[row : row + len(zeros), column : column + zeros.shape[1]]
        part.copy_(zeros[: len(part)])

    def randomize(self, generator: torch.Generator) -> None:
        if self._target is not None:
            self._target.fill_(SYMMETRIC_ZERO)


class GroupIndex(TensorConverter):
    """The group of each input, int32 [inputs] (GPTQ's g_idx) -> ``target`` int32 [inputs], the inputs by group."""

    dtypes = _WORD_DTYPES
    rows_multiple = 0
    precedes = True

    def __init__(self, target: torch.Tensor, group_size: int, name: str) -> None:
        self._target, self._group_size, self._name = target, group_size, name

    def store(self, values: torch.Tensor, first: int) -> None:
        order = torch.argsort(values, stable=True)
        groups = torch.arange(len(values), dtype=values.dtype, device=values.device) // self._group_size
        if not torch.equal(values[order], groups):
            raise ModelError(f"tensor {self._name!r} must assign {self._group_size} inputs to each group")
        self._target.copy_(order)

    def randomize(self, generator: torch.Generator) -> None:
        size = len(self._target)
        self._target.copy_(torch.randperm(size, generator=generator, device=self._target.device))


class ConsecutiveGroups(TensorConverter):
    """The group of each input, int32 [inputs], of a checkpoint whose groups are consecutive: compared, and not kept."""

    dtypes = _WORD_DTYPES
    rows_multiple = 0

    def __init__(self, group_size: int, name: str) -> None:
        self._group_size, self._name = group_size, name

    def store(self, values: torch.Tensor, first: int) -> None:
        inputs = torch.arange(len(values), dtype=values.dtype, device=values.device)
        if not torch.equal(values, inputs // self._group_size):
            raise ModelError(
                f"tensor {self._name!r} assigns inputs to groups in another order than config.json implies "
                "('desc_act' with 'static_groups', and 'actorder', are not supported)"
            )

    def randomize(self, generator: torch.Generator) -> None:
        return


class StoredShape(TensorConverter):
    """The shape of a packed matrix as compressed-tensors stores it, int64 [2]; it is compared, and not kept."""

    dtypes = ("I64", "I32")
    rows_multiple = 0

    def __init__(self, shape: tuple[int, int], name: str) -> None:
        self._shape, self._name = shape, name

    def store(self, values: torch.Tensor, first: int) -> None:
        found = values.tolist()
        if found != list(self._shape):
            raise ModelError(
                f"tensor {self._name!r} says that the matrix is {found}, but config.json implies {list(self._shape)}"
            )

    def randomize(self, generator: torch.Generator) -> None:
        return


def typical_scale(inputs: int, largest: float = FP8_MAX) -> float:
    """Return the scale with which weights up to ``largest`` have a variance of about 1 / inputs."""
    scale: float = (3.0 / inputs) ** 0.5 / largest
    return scale


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """Unpack words int32 [rows, columns] to uint8 [rows, columns, 8], from the lowest four bits on."""
    return torch.stack([(words >> shift & 15).to(torch.uint8) for shift in range(0, 32, 4)], -1)


def _unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """Unpack words int32 [rows, columns] of AutoAWQ to uint8 [rows, 8 * columns], in the order of the outputs."""
    unpacked = _unpack(words)
    return unpacked[:, :, list(_AWQ_ORDER)].flatten(1)
