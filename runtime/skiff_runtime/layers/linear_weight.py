"""The matrix of a linear layer as a rank keeps it: in the model's dtype, in FP8, or in 4-bit integers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from skiff_runtime.errors import ConfigError, ModelError
from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.kernels.fp8 import (
    ALIGNMENT,
    Activations,
    block_fp8_linear,
    can_fuse_add_rms_norm,
    can_fuse_silu_and_mul,
    fp8_linear,
    fp8_linear_into,
    fused_add_rms_norm_fp8_linear,
    fused_fp8_linear_silu_and_mul,
    quantize_activations,
    quantize_grouped_activations,
    quantize_static_activations,
)
from skiff_runtime.kernels.fp8_tensors import BlockFP8Weight, QuantizedActivations, empty_fp8_weight
from skiff_runtime.kernels.int4_tensors import PER_WORD, Int4Weight
from skiff_runtime.kernels.linear import fused_linear_silu_and_mul, linear, linear_into
from skiff_runtime.kernels.w4a16 import int4_linear
from skiff_runtime.layers.sharding import LayerContext, WeightShard
from skiff_runtime.layers.tensor_converters import (
    AwqWords,
    CompressedWords,
    ConsecutiveGroups,
    GptqWords,
    GroupIndex,
    ScalarScale,
    ScaleTable,
    StoredShape,
    ZeroPoints,
    typical_scale,
)
from skiff_runtime.layers.weight_format import (
    Fp8Format,
    Int4Format,
    count_blocks,
    count_words,
    padded_scale_columns,
)

INT4_ALIGNMENT: Final = 64
"""The outputs of an int4 weight must be a multiple of it for a GPU's product."""


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """Indices ``start`` to ``stop`` along ``dim`` of the checkpoint's module ``name``, and the rows that they fill.

    ``shape`` is (outputs, inputs) of the whole module; ``row`` is the first of the rank's matrix.
    """

    name: str
    shape: tuple[int, int]
    dim: int
    start: int
    stop: int
    row: int

    @property
    def outputs(self) -> int:
        """The number of rows of the rank's matrix."""
        return self.stop - self.start if self.dim == 0 else self.shape[0]

    @property
    def rows(self) -> slice:
        """The rows of the rank's matrix."""
        return slice(self.row, self.row + self.outputs)


class LinearWeight(ABC):
    """A matrix [outputs, inputs]."""

    supports_apply_into: ClassVar[bool] = False
    """Products in this format can be written into memory that is given, by ``apply_into``."""

    @property
    def unquantized(self) -> torch.Tensor | None:
        """The matrix in the model's dtype; ``None`` in other formats."""
        return None

    @property
    def appended(self) -> torch.Tensor | None:
        """Rows behind the matrix, in the same memory; ``None`` if there are none."""
        return None

    @abstractmethod
    def apply(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply: [T, inputs] -> [T, outputs], in the model's dtype."""

    def apply_into(self, x: Activations, out: torch.Tensor) -> None:
        """Write the product of x [T, inputs] into out [T, outputs] of the model's dtype; T is large.

        Only where ``supports_apply_into`` is true.
        """
        raise NotImplementedError

    def fused_silu_and_mul(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """Return ``silu_and_mul`` of ``apply``, bit for bit, by one kernel; ``None`` where there is none, or no faster one.

        The matrix is one of gate and up: [T, inputs] -> [T, outputs / 2].
        """
        return None

    def fused_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (``apply`` of the RMSNorm of the sum, the sum) of x and residual [T, inputs], by one kernel.

        Up to a rounding of the norm; ``None`` where there is no such kernel, or no faster one.
        """
        return None

    @abstractmethod
    def weight_shards(self, parts: Sequence[MatrixPart]) -> Iterator[WeightShard]:
        """Yield the shards of the checkpoint's tensors that fill the matrix.

        Raises ``ConfigError`` where the ranks' shards would divide what the format keeps together.
        """


class UnquantizedLinearWeight(LinearWeight):
    """A matrix in the model's dtype."""

    supports_apply_into = True

    def __init__(self, outputs: int, inputs: int, context: LayerContext, appended_rows: int = 0) -> None:
        self._all_rows = context.empty(outputs + appended_rows, inputs)
        self.values = self._all_rows[:outputs]
        self._appended = self._all_rows[outputs:].zero_()

    @property
    def unquantized(self) -> torch.Tensor:
        """The matrix."""
        return self.values

    @property
    def appended(self) -> torch.Tensor | None:
        return self._appended if len(self._appended) else None

    def apply_with_appended(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by the appended rows as well: [T, inputs] -> [T, outputs + appended rows]; ``bias`` is of all of these.

        A kernel may read the rows before its wait, though ``fill_slot`` writes them: the launch that groups a step's tokens
        lies between, and lets none behind it start early.
        """
        return linear(x, self._all_rows, bias)

    def apply(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply ``x``, which must not be quantized."""
        assert isinstance(x, torch.Tensor)
        return linear(x, self.values, bias)

    def apply_into(self, x: Activations, out: torch.Tensor) -> None:
        assert isinstance(x, torch.Tensor)
        linear_into(x, self.values, out)

    def apply_late(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply; the kernel that is launched next starts only after ``x`` is complete."""
        return linear(x, self.values, bias, late=True)

    def fused_silu_and_mul(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """Multiply one token, which must not be quantized, by a GEMV."""
        assert isinstance(x, torch.Tensor)
        return fused_linear_silu_and_mul(x, self.values, bias)

    def weight_shards(self, parts: Sequence[MatrixPart]) -> Iterator[WeightShard]:
        """Yield the shards of the values; there are no scales."""
        for part in parts:
            target = self.values[part.rows]
            yield WeightShard(f"{part.name}.weight", part.shape, part.dim, part.start, part.stop, target)


class Fp8LinearWeight(LinearWeight):
    """A matrix in FP8 (e4m3) with one scale per output, or per module. Activations have one scale per token, or one."""

    supports_apply_into = True

    def __init__(
        self, outputs: int, inputs: int, context: LayerContext, weight_format: Fp8Format, parts: int
    ) -> None:
        if context.device.type == "cuda" and (outputs % ALIGNMENT or inputs % ALIGNMENT):
            remedy = ", or --quantization none" if context.stored_format is None else ""
            raise ConfigError(
                f"weights in FP8 need matrices whose sizes are multiples of {ALIGNMENT} on each rank, but one is "
                f"{outputs} x {inputs}; use another --tp{remedy}"
            )
        self._scale_ub = context.activation_scale_ub
        self._format = weight_format
        self.matrix = empty_fp8_weight(outputs, inputs, context.device)
        self._input_scales: torch.Tensor | None = None
        if weight_format.activations == "static":
            self._input_scales = torch.empty(parts, dtype=torch.float32, device=context.device)

    def apply(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply with scales; quantize ``x`` if it is not yet."""
        return fp8_linear(self._quantize_static(x), self.matrix, bias, bound=self._scale_ub)

    def apply_into(self, x: Activations, out: torch.Tensor) -> None:
        fp8_linear_into(self._quantize_static(x), self.matrix, out, bound=self._scale_ub)

    def _quantize_static(self, x: Activations) -> Activations:
        """Quantize ``x`` if it is not yet, and if the checkpoint has its scales."""
        if self._input_scales is None or not isinstance(x, torch.Tensor):
            return x
        return quantize_static_activations(x, self._input_scales)

    def fused_silu_and_mul(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """Multiply one token by a GEMV; quantize ``x`` if it is not yet."""
        if not can_fuse_silu_and_mul(x):
            return None
        x = self._quantize_static(x)
        if isinstance(x, torch.Tensor):
            x = quantize_activations(x, self._scale_ub)
        return fused_fp8_linear_silu_and_mul(x, self.matrix, bias)

    def fused_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Normalize, quantize and multiply one token by a GEMV, if the matrix is small."""
        if self._input_scales is not None or not can_fuse_add_rms_norm(x, residual, self.matrix):
            return None
        return fused_add_rms_norm_fp8_linear(
            x, residual, norm_weight, eps, self.matrix, bias, bound=self._scale_ub
        )

    def weight_shards(self, parts: Sequence[MatrixPart]) -> Iterator[WeightShard]:
        """Yield the shards of values and scales.

        Modules that are packed share their input, so the largest of their scales of it holds for all of them.
        """
        for number, part in enumerate(parts):
            values, scales = self.matrix.values[part.rows], self.matrix.scales[part.rows]
            name = f"{part.name}.weight"
            bounds = part.shape, part.dim, part.start, part.stop
            if self._format.scales == "channel":
                yield WeightShard(name, *bounds, values, scales)
            else:
                yield WeightShard(name, *bounds, values)
                aliases = (f"{name}_scale_inv",)
                yield _scalar_shard(f"{name}_scale", scales, typical_scale(part.shape[1]), aliases)
            if self._input_scales is not None:
                target = self._input_scales[number : number + 1]
                aliases = (f"{part.name}.activation_scale",)
                yield _scalar_shard(f"{part.name}.input_scale", target, 1 / 16, aliases)


class BlockFp8LinearWeight(LinearWeight):
    """A matrix in FP8 with one scale for each block of 128 x 128; activations have one per token and 128 inputs."""

    def __init__(self, outputs: int, inputs: int, context: LayerContext) -> None:
        if context.device.type == "cuda" and (outputs % ALIGNMENT or inputs % ALIGNMENT):
            raise ConfigError(
                f"weights in block FP8 need matrices whose sizes are multiples of {ALIGNMENT} on each rank, but one is "
                f"{outputs} x {inputs}; use another --tp"
            )
        self._tp_size = context.group.tp_size
        unscaled = empty_fp8_weight(outputs, inputs, context.device)
        shape = (count_blocks(outputs), padded_scale_columns(inputs))
        scales = torch.zeros(shape, dtype=torch.float32, device=context.device)
        self.matrix = BlockFP8Weight(unscaled.values, scales, unscaled.tile_counters)

    def apply(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply with scales; quantize ``x`` if it is not yet."""
        quantized = x if isinstance(x, QuantizedActivations) else quantize_grouped_activations(x)
        return block_fp8_linear(quantized, self.matrix, bias)

    def weight_shards(self, parts: Sequence[MatrixPart]) -> Iterator[WeightShard]:
        """Yield the shards of values and scales; a block must not be divided."""
        for part in parts:
            name = f"{part.name}.weight"
            if part.row % FP8_BLOCK:
                raise ModelError(
                    f"tensor {name!r} begins inside a block of {FP8_BLOCK} outputs of the matrix that packs it, which "
                    "is not supported"
                )
            _check_division(part, FP8_BLOCK, self._tp_size, "the 128 x 128 blocks of FP8 weights")
            yield WeightShard(
                name, part.shape, part.dim, part.start, part.stop, self.matrix.values[part.rows]
            )
            first = part.row // FP8_BLOCK
            target = self.matrix.scales[first : first + count_blocks(part.outputs)]
            yield WeightShard(
                f"{name}_scale_inv",
                (count_blocks(part.shape[0]), count_blocks(part.shape[1])),
                part.dim,
                part.start // FP8_BLOCK,
                count_blocks(part.stop),
                target,
                converter=ScaleTable(target, typical_scale(part.shape[1])),
                aliases=(f"{name}_scale",),
            )


class Int4LinearWeight(LinearWeight):
    """A matrix of 4-bit integers with scales, and perhaps zero points, of groups of inputs."""

    def __init__(
        self, outputs: int, inputs: int, context: LayerContext, weight_format: Int4Format, parts: int
    ) -> None:
        if context.device.type == "cuda" and outputs % INT4_ALIGNMENT:
            raise ConfigError(
                f"4-bit weights need matrices whose outputs are a multiple of {INT4_ALIGNMENT} on each rank, but one is "
                f"{outputs} x {inputs}; use another --tp"
            )
        device = context.device
        self._format, self._inputs, self._tp_size = weight_format, inputs, context.group.tp_size
        self._orders: torch.Tensor | None = None
        if weight_format.activation_order:
            self._orders = torch.empty((parts, inputs), dtype=torch.int32, device=device)
        table = (outputs, weight_format.count_groups(inputs))
        self.matrix = Int4Weight(
            words=torch.empty((outputs, count_words(inputs)), dtype=torch.int32, device=device),
            scales=context.empty(*table),
            zeros=context.empty(*table) if weight_format.zero_points else None,
            inputs=inputs,
            group_size=weight_format.group_size,
            order=None if self._orders is None else self._orders[0],
            tile_counters=torch.zeros(outputs, dtype=torch.int32, device=device),
        )

    def apply(self, x: Activations, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply ``x``, which must not be quantized."""
        assert isinstance(x, torch.Tensor)
        return int4_linear(x, self.matrix, bias)

    def weight_shards(self, parts: Sequence[MatrixPart]) -> Iterator[WeightShard]:
        """Yield the shards of integers, scales, zero points and groups; a group or a word must not be divided."""
        group_size = self._format.group_size
        for number, part in enumerate(parts):
            if part.dim == 1 and self._orders is not None and self._tp_size > 1:
                raise ConfigError(
                    f"--tp {self._tp_size} cannot divide {part.name!r}: its inputs are in the order of GPTQ's "
                    "'desc_act'; use --tp 1"
                )
            if part.dim == 1 and group_size is not None:
                _check_division(part, group_size, self._tp_size, f"groups of {group_size} inputs")
            _check_division(part, PER_WORD, self._tp_size, "words of eight 4-bit weights")
            if part.shape[1] % (group_size or PER_WORD):
                raise ModelError(
                    f"the {part.shape[1]} inputs of {part.name!r} are no whole groups of {group_size or PER_WORD}"
                )
            if self._format.packing == "compressed-tensors":
                yield from self._compressed_shards(part)
            else:
                yield from self._transposed_shards(part, number)

    def _compressed_shards(self, part: MatrixPart) -> Iterator[WeightShard]:
        """Yield the shards of tensors whose first dimension is the outputs."""
        words, zeros = self.matrix.words[part.rows], self.matrix.zeros
        outputs, inputs = part.shape
        name = f"{part.name}.weight_packed"
        start, stop = (
            (part.start, part.stop) if part.dim == 0 else (part.start // PER_WORD, -(-part.stop // PER_WORD))
        )
        converter = CompressedWords(words, self._inputs)
        yield WeightShard(
            name, (outputs, -(-inputs // PER_WORD)), part.dim, start, stop, words, converter=converter
        )
        name = f"{part.name}.weight_shape"
        nothing = words.new_empty(0)
        yield WeightShard(name, (2,), 0, 0, 2, nothing, converter=StoredShape(part.shape, name))
        yield self._group_check(part, "weight_g_idx")
        groups = self._format.count_groups(inputs)
        scales = self.matrix.scales[part.rows]
        typical = ScaleTable(scales, typical_scale(inputs, SYMMETRIC_RANGE))
        yield WeightShard(
            f"{part.name}.weight_scale",
            (outputs, groups),
            part.dim,
            *self._group_range(part),
            scales,
            converter=typical,
        )
        if zeros is not None:
            name = f"{part.name}.weight_zero_point"
            start, stop = (part.start // PER_WORD, -(-part.stop // PER_WORD))
            if part.dim == 1:
                start, stop = self._group_range(part)
            target = zeros[part.rows]
            points = ZeroPoints(target, self._format.packing, self._format.zero_offset, name)
            shape = (-(-outputs // PER_WORD), groups)
            yield WeightShard(name, shape, part.dim, start, stop, target, converter=points)

    def _transposed_shards(self, part: MatrixPart, number: int) -> Iterator[WeightShard]:
        """Yield the shards of AutoAWQ's and GPTQ's tensors, whose first dimension is the inputs or the groups."""
        words, zeros = self.matrix.words[part.rows], self.matrix.zeros
        outputs, inputs = part.shape
        groups, dim = self._format.count_groups(inputs), 1 - part.dim
        packed = part.start // PER_WORD, part.stop // PER_WORD
        name = f"{part.name}.qweight"
        if self._format.packing == "awq":
            shape, awq = (inputs, outputs // PER_WORD), AwqWords(words)
            bounds = (part.start, part.stop) if part.dim == 1 else packed
            yield WeightShard(name, shape, dim, *bounds, words, converter=awq)
        else:
            if self._orders is None:
                yield self._group_check(part, "g_idx")
            else:
                index_name = f"{part.name}.g_idx"
                order = self._orders[number]
                index = GroupIndex(order, self._format.group_size or inputs, index_name)
                yield WeightShard(index_name, (inputs,), 0, 0, inputs, order, converter=index)
            shape, gptq = (
                (inputs // PER_WORD, outputs),
                GptqWords(words, self._orders, number, f"{part.name}.g_idx"),
            )
            bounds = packed if part.dim == 1 else (part.start, part.stop)
            yield WeightShard(name, shape, dim, *bounds, words, converter=gptq)
        scales = self.matrix.scales[part.rows]
        bounds = self._group_range(part)
        table = ScaleTable(scales, typical_scale(inputs, SYMMETRIC_RANGE), transposed=True)
        yield WeightShard(f"{part.name}.scales", (groups, outputs), dim, *bounds, scales, converter=table)
        name = f"{part.name}.qzeros"
        target = None if zeros is None else zeros[part.rows]
        points = ZeroPoints(target, self._format.packing, self._format.zero_offset, name)
        kept = words.new_empty(0) if target is None else target
        bounds = bounds if part.dim == 1 else packed
        yield WeightShard(name, (groups, outputs // PER_WORD), dim, *bounds, kept, converter=points)

    def _group_check(self, part: MatrixPart, end: str) -> WeightShard:
        """Return the shard of the groups of inputs, which every rank compares with consecutive ones."""
        inputs, name = part.shape[1], f"{part.name}.{end}"
        check = ConsecutiveGroups(self._format.group_size or inputs, name)
        empty = self.matrix.words.new_empty(0)
        return WeightShard(name, (inputs,), 0, 0, inputs, empty, converter=check, optional=True)

    def _group_range(self, part: MatrixPart) -> tuple[int, int]:
        """Return the outputs of the part, or the groups of its inputs: its range of a table of scales."""
        if part.dim == 0:
            return part.start, part.stop
        size = self._format.group_size
        return (0, 1) if size is None else (part.start // size, -(-part.stop // size))


SYMMETRIC_RANGE: Final = 7
"""The magnitude of the largest 4-bit weight before its scale, where random ones are drawn."""


def _scalar_shard(name: str, target: torch.Tensor, typical: float, aliases: tuple[str, ...]) -> WeightShard:
    """Return the shard of a single number, which every rank reads."""
    return WeightShard(name, (), 0, 0, 1, target, converter=ScalarScale(target, typical), aliases=aliases)


def _check_division(part: MatrixPart, multiple: int, tp_size: int, what: str) -> None:
    """Raise ``ConfigError`` if a rank's shard begins or ends inside of a run of ``multiple`` outputs or inputs."""
    if part.start % multiple or (part.stop % multiple and part.stop != part.shape[part.dim]):
        raise ConfigError(
            f"--tp {tp_size} divides {what}: the shard of {part.name!r} is {part.start} to {part.stop} of "
            f"{part.shape[part.dim]}; use a smaller --tp"
        )


def make_weight(
    outputs: int, inputs: int, context: LayerContext, parts: int = 1, *, appended_rows: int = 0
) -> LinearWeight:
    """Allocate an uninitialized matrix of the context's format that packs ``parts`` modules of the checkpoint.

    ``appended_rows``: more rows of zeros behind the matrix; none in other formats than the model's dtype.
    """
    weight_format = context.weight_format
    if weight_format is None:
        return UnquantizedLinearWeight(outputs, inputs, context, appended_rows)
    if isinstance(weight_format, Int4Format):
        return Int4LinearWeight(outputs, inputs, context, weight_format, parts)
    if weight_format.scales == "block":
        return BlockFp8LinearWeight(outputs, inputs, context)
    return Fp8LinearWeight(outputs, inputs, context, weight_format, parts)
