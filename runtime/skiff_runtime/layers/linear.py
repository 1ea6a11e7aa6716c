"""Linear layers, sharded by columns (outputs) or by rows (inputs) over the tensor-parallel ranks.

Megatron-style tensor parallelism (Shoeybi et al., 2019): a column-parallel layer needs no communication; the outputs
of the row-parallel layer after it are summed over the ranks.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from skiff_runtime.kernels.fp8 import Activations
from skiff_runtime.layers.linear_weight import MatrixPart, make_weight
from skiff_runtime.layers.lora import LoraLayer, LoraModule
from skiff_runtime.layers.partial_sum import LayerOutput, PartialProduct, PartialSum
from skiff_runtime.layers.sharding import LayerContext, WeightShard, replicated_weight


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
        self.weight = make_weight(sum(self.sizes), inputs, context, len(self.sizes))
        self.bias = context.empty(sum(self.sizes)) if bias else None
        self._lora = _make_lora_layer(
            [
                LoraModule(each.name, each.total, inputs, slice(each.start, each.stop), slice(0, inputs))
                for each in modules
            ],
            context,
        )

    def __call__(self, x: Activations) -> torch.Tensor:
        return _add_lora(self.weight.apply(x, self.bias), x, self._lora)

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


class RowParallelLinear:
    """[T, this rank's inputs] -> [T, outputs]: with more than one rank a partial sum; the bias is added after the sum.

    The product of a partial sum is left to the norm behind it where one launch computes both.
    """

    def __init__(self, name: str, inputs: int, outputs: int, *, bias: bool, context: LayerContext) -> None:
        self._name = name
        self._context = context
        self._group = context.group
        self._inputs = shard_evenly(name, inputs, context)
        self._shape = (outputs, inputs)
        self.weight = make_weight(outputs, self._inputs.stop - self._inputs.start, context)
        self.bias = context.empty(outputs) if bias else None
        local_inputs = slice(self._inputs.start, self._inputs.stop)
        module = LoraModule(name, outputs, inputs, slice(0, outputs), local_inputs)
        self._lora = _make_lora_layer([module], context)

    def __call__(self, x: Activations) -> LayerOutput:
        if self._group.tp_size == 1:
            return _add_lora(self.weight.apply(x, self.bias), x, self._lora)
        matrix = self.weight.unquantized
        if (
            matrix is not None
            and self.bias is None
            and not self._context.has_adapters
            and isinstance(x, torch.Tensor)
            and self._group.can_fuse_linear(x, matrix)
        ):
            return PartialProduct(x, matrix, self._group)
        return PartialSum(_add_lora(self.weight.apply(x), x, self._lora), self._group, self.bias)

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


def _make_lora_layer(modules: Sequence[LoraModule], context: LayerContext) -> LoraLayer | None:
    """Allocate the LoRA matrices of a layer, in the model's dtype; None if adapters are not served."""
    if context.lora is None:
        return None
    return LoraLayer(modules, context.lora, context.dtype, context.device)


def _add_lora(out: torch.Tensor, x: Activations, lora: LoraLayer | None) -> torch.Tensor:
    """Add the adapters' products of ``x`` to ``out`` in place, and return it."""
    if lora is not None:
        lora.add(out, x)
    return out
