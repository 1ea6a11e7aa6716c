"""Linear layers, sharded by columns (outputs) or by rows (inputs) over the tensor-parallel ranks.

Megatron-style tensor parallelism (Shoeybi et al., 2019): a column-parallel layer needs no communication; the outputs
of the row-parallel layer after it are summed over the ranks.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from skiff_runtime.kernels.fp8 import Activations
from skiff_runtime.kernels.tuning import CopyExchangeTuning, tuning_for
from skiff_runtime.layers.linear_weight import (
    LinearWeight,
    MatrixPart,
    UnquantizedLinearWeight,
    make_weight,
)
from skiff_runtime.layers.lora import LinearOutput, LoraLayer, LoraModule
from skiff_runtime.layers.norm import QuantizingRMSNorm
from skiff_runtime.layers.partial_sum import ExchangedSum, LayerOutput, PartialProduct, PartialSum
from skiff_runtime.layers.sharding import LayerContext, WeightShard, replicated_weight

ROW_MULTIPLE: Final = 256
"""The rows of a chunk are a multiple of it, so that no chunk ends inside a tile of the library's kernels."""


@dataclass(frozen=True, slots=True)
class ModuleShard:
    """Columns ``start`` to ``stop`` (of outputs or inputs) of the ``total`` of the checkpoint's module ``name``."""

    name: str
    total: int
    start: int
    stop: int


def shard_evenly(name: str, total: int, context: LayerContext) -> ModuleShard:
    """Return the rank's equal share of a module's ``total`` outputs or inputs."""
    group = context.group
    share = total // group.tp_size
    return ModuleShard(name, total, group.tp_rank * share, (group.tp_rank + 1) * share)


def shard_or_replicate(name: str, blocks: int, width: int, context: LayerContext) -> ModuleShard:
    """Return the rank's share of ``blocks`` blocks of ``width`` outputs; with fewer blocks than ranks, replicate them."""
    tp_size, tp_rank = context.group.tp_size, context.group.tp_rank
    if blocks >= tp_size:
        return shard_evenly(name, blocks * width, context)
    block = tp_rank * blocks // tp_size
    return ModuleShard(name, blocks * width, block * width, (block + 1) * width)


class ColumnParallelLinear:
    """[..., inputs] -> [..., this rank's outputs]: several modules of the checkpoint packed into one matrix."""

    def __init__(
        self, inputs: int, modules: Sequence[ModuleShard], *, bias: bool, context: LayerContext
    ) -> None:
        self._context = context
        self._inputs = inputs
        self._modules = tuple(modules)
        self.sizes = [module.stop - module.start for module in modules]
        outputs, parts = sum(self.sizes), len(self.sizes)
        appended_rows = 0 if context.lora is None else context.lora.count_appended_rows(parts)
        self.weight = make_weight(outputs, inputs, context, parts, appended_rows=appended_rows)
        self._padded_bias = _make_bias(outputs, self.weight, context) if bias else None
        self.bias = None if self._padded_bias is None else self._padded_bias[:outputs]
        self._lora = _make_lora_layer(
            [
                LoraModule(each.name, each.total, inputs, slice(each.start, each.stop), slice(0, inputs))
                for each in modules
            ],
            self.weight,
            context,
        )

    def __call__(self, x: Activations) -> LinearOutput:
        return _apply(x, self.weight, self._lora, self.bias, self._padded_bias)

    def apply_after_norm(
        self, norm: QuantizingRMSNorm, x: LayerOutput, residual: torch.Tensor
    ) -> tuple[LinearOutput, torch.Tensor]:
        """Return (the product of norm(x + residual), x + residual), by one kernel where that is faster.

        ``norm`` is one of this layer's context.
        """
        if isinstance(x, torch.Tensor) and not self._context.has_adapters:
            fused = self.weight.fused_add_rms_norm(x, residual, norm.weight, norm.eps, self.bias)
            if fused is not None:
                return fused
        normed, total = norm.add_and_normalize(x, residual, self.weight.unquantized)
        return self(normed), total

    def fused_silu_and_mul(self, x: Activations) -> torch.Tensor | None:
        """Return SwiGLU's product [..., n] of the layer's two modules, gate and up, of n outputs each, by one kernel.

        ``None`` where no kernel does both, or no faster one, and in steps with adapters.
        """
        if self._context.has_adapters:
            return None
        return self.weight.fused_silu_and_mul(x, self.bias)

    def weight_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield the shards of the checkpoint's tensors that fill this layer."""
        rows = itertools.accumulate(self.sizes, initial=0)
        yield from self.weight.weight_shards(
            [
                MatrixPart(
                    f"{prefix}{module.name}", (module.total, self._inputs), 0, module.start, module.stop, row
                )
                for module, row in zip(self._modules, rows, strict=False)
            ]
        )
        if self.bias is not None:
            for module, target in zip(self._modules, torch.split(self.bias, self.sizes), strict=True):
                name = f"{prefix}{module.name}.bias"
                yield WeightShard(name, (module.total,), 0, module.start, module.stop, target)

    def lora_layers(self, prefix: str) -> Iterator[tuple[str, LoraLayer]]:
        """Yield the layer's LoRA matrices with the ``prefix`` of its modules' names; none if adapters are not served."""
        if self._lora is not None:
            yield prefix, self._lora


def divide_rows(rows: int, tuning: CopyExchangeTuning) -> list[slice]:
    """Divide a product of ``rows`` rows into chunks, so that a chunk can be sent while the next one is computed.

    Each chunk is half of what remains, in whole ``ROW_MULTIPLE`` rows: few chunks, and little that is sent behind the last one.
    """
    chunks: list[slice] = []
    start, least = 0, max(tuning.min_chunk_rows, ROW_MULTIPLE)
    while len(chunks) < tuning.max_chunks - 1 and rows - start >= 2 * least:
        size = -(-(rows - start) // (2 * ROW_MULTIPLE)) * ROW_MULTIPLE
        if rows - start - size < least:
            size -= ROW_MULTIPLE
        chunks.append(slice(start, start + size))
        start += size
    return [*chunks, slice(start, rows)]


class RowParallelLinear:
    """[T, this rank's inputs] -> [T, outputs]: with more than one rank a partial sum; the bias is added after the sum.

    The product of a partial sum is left to the norm behind it where one launch computes both. With many rows, as in
    prefill, two ranks exchange their products while they compute them, chunk by chunk, and leave the addition to the norm.
    """

    def __init__(self, name: str, inputs: int, outputs: int, *, bias: bool, context: LayerContext) -> None:
        self._name = name
        self._context = context
        self._group = context.group
        self._inputs = shard_evenly(name, inputs, context)
        self._shape = (outputs, inputs)
        appended_rows = 0
        if (
            context.lora is not None and context.group.tp_size == 1
        ):  # else the next kernel has only a part of A x
            appended_rows = context.lora.count_appended_rows(1)
        local = self._inputs.stop - self._inputs.start
        self.weight = make_weight(outputs, local, context, appended_rows=appended_rows)
        self._padded_bias = _make_bias(outputs, self.weight, context) if bias else None
        self.bias = None if self._padded_bias is None else self._padded_bias[:outputs]
        local_inputs = slice(self._inputs.start, self._inputs.stop)
        module = LoraModule(name, outputs, inputs, slice(0, outputs), local_inputs)
        self._lora = _make_lora_layer([module], self.weight, context)

    def __call__(self, x: Activations) -> LayerOutput:
        if self._group.tp_size == 1:
            return _apply(x, self.weight, self._lora, self.bias, self._padded_bias)
        matrix = self.weight.unquantized
        if (
            matrix is not None
            and self.bias is None
            and not self._context.has_adapters
            and isinstance(x, torch.Tensor)
            and self._group.can_fuse_linear(x, matrix)
        ):
            return PartialProduct(x, matrix, self._group)
        if self._can_exchange(x):
            return self._multiply_and_exchange(x)
        part = _apply(x, self.weight, self._lora)
        assert isinstance(part, torch.Tensor), "nothing is appended to a part of a sum"
        return PartialSum(part, self._group, self.bias)

    def _can_exchange(self, x: Activations) -> bool:
        """Return whether ``_multiply_and_exchange`` takes ``x``.

        The answer depends on the shape and dtype of the product, and on whether the step has adapters, so all ranks agree.
        """
        if self._context.has_adapters or not self.weight.supports_apply_into:
            return False
        return self._group.can_exchange(len(x) * self._shape[0] * x.dtype.itemsize, x.dtype)

    def _multiply_and_exchange(self, x: Activations) -> ExchangedSum:
        """Return the products of both ranks [T, outputs]; each chunk of rows is sent beside the product of the next one."""
        out = torch.empty((len(x), self._shape[0]), dtype=x.dtype, device=self._group.device)
        exchange = self._group.start_exchange(out)
        for rows in divide_rows(len(x), tuning_for(self._group.device).copy_exchange):
            part = x[rows] if isinstance(x, torch.Tensor) else x.select_rows(rows)
            self.weight.apply_into(part, out[rows])
            exchange.send(rows)
        return ExchangedSum(out, exchange.finish(), self.bias)

    def weight_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield the shards of the checkpoint's tensors that fill this layer."""
        module = self._inputs
        part = MatrixPart(f"{prefix}{self._name}", self._shape, 1, module.start, module.stop, 0)
        yield from self.weight.weight_shards([part])
        if self.bias is not None:
            yield replicated_weight(f"{prefix}{self._name}.bias", self.bias)

    def lora_layers(self, prefix: str) -> Iterator[tuple[str, LoraLayer]]:
        """Yield the layer's LoRA matrices with the ``prefix`` of its module's name; none if adapters are not served."""
        if self._lora is not None:
            yield prefix, self._lora


def _make_bias(outputs: int, weight: LinearWeight, context: LayerContext) -> torch.Tensor:
    """Allocate an uninitialized bias, with zeros for the appended rows of ``weight`` behind it."""
    appended_rows = 0 if weight.appended is None else len(weight.appended)
    bias = context.empty(outputs + appended_rows)
    bias[outputs:].zero_()
    return bias


def _make_lora_layer(
    modules: Sequence[LoraModule], weight: LinearWeight, context: LayerContext
) -> LoraLayer | None:
    """Allocate the LoRA matrices of a layer, in the model's dtype; None if adapters are not served."""
    if context.lora is None:
        return None
    return LoraLayer(modules, context.lora, context.dtype, context.device, weight.appended)


def _apply(
    x: Activations,
    weight: LinearWeight,
    lora: LoraLayer | None,
    bias: torch.Tensor | None = None,
    padded_bias: torch.Tensor | None = None,
) -> LinearOutput:
    """Multiply, and add the adapters' products of ``x`` or leave that to the next kernel.

    ``padded_bias`` is the bias with zeros for the weight's appended rows.
    """
    if lora is None or not lora.is_active:
        return weight.apply(x, bias)
    assert isinstance(x, torch.Tensor), "norms quantize nothing in such steps"
    if not isinstance(weight, UnquantizedLinearWeight):
        out = weight.apply(x, bias)
        lora.add(out, x, x_is_complete=False)
        return out
    if lora.should_defer(len(x)):
        return lora.defer(weight.apply_with_appended(x, padded_bias), x)
    early = lora.should_read_early(len(x))
    out = weight.apply_late(x, bias) if early else weight.apply(x, bias)
    lora.add(out, x, x_is_complete=early)
    return out
