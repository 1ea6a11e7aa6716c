"""Linear layers cut by columns (outputs) or rows (inputs) over the ranks.

Megatron-style tensor parallelism (Shoeybi et al., 2019): a column-parallel layer needs no
communication, the row-parallel one after it sums over ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from skiff_runtime.kernels.fp8 import Activations
from skiff_runtime.layers.linear_weight import make_weight
from skiff_runtime.layers.sharding import LayerContext, Piece, whole


@dataclass(frozen=True, slots=True)
class Cut:
    """Outputs ``start`` to ``stop`` of the ``total`` outputs of the checkpoint's layer ``name``."""

    name: str
    total: int
    start: int
    stop: int


def shard_evenly(name: str, total: int, placement: LayerContext) -> Cut:
    """The rank's share of outputs that the ranks divide."""
    share = total // placement.group.size
    return Cut(name, total, placement.group.rank * share, (placement.group.rank + 1) * share)


def shard_or_replicate(name: str, blocks: int, width: int, placement: LayerContext) -> Cut:
    """The rank's share of ``blocks`` blocks of ``width`` outputs; fewer blocks than ranks are replicated."""
    size, rank = placement.group.size, placement.group.rank
    if blocks >= size:
        return shard_evenly(name, blocks * width, placement)
    block = rank * blocks // size
    return Cut(name, blocks * width, block * width, (block + 1) * width)


class ColumnParallelLinear:
    """[..., inputs] -> [..., this rank's outputs]: several layers of the checkpoint fused into one product."""

    def __init__(self, inputs: int, cuts: Sequence[Cut], *, bias: bool, placement: LayerContext) -> None:
        self._inputs = inputs
        self._cuts = tuple(cuts)
        self.sizes = [cut.stop - cut.start for cut in cuts]
        self.weight = make_weight(sum(self.sizes), inputs, placement)
        self.bias = placement.empty(sum(self.sizes)) if bias else None

    def __call__(self, x: Activations) -> torch.Tensor:
        return self.weight.product(x, self.bias)

    def pieces(self, prefix: str) -> Iterator[Piece]:
        """Parts of the checkpoint that fill this layer."""
        for cut, rows in zip(self._cuts, self.weight.split(self.sizes), strict=True):
            shape = (cut.total, self._inputs)
            name = f"{prefix}{cut.name}.weight"
            yield Piece(name, shape, 0, cut.start, cut.stop, rows.values, rows.scales)
        if self.bias is not None:
            for cut, target in zip(self._cuts, torch.split(self.bias, self.sizes), strict=True):
                yield Piece(f"{prefix}{cut.name}.bias", (cut.total,), 0, cut.start, cut.stop, target)


class RowParallelLinear:
    """[..., this rank's inputs] -> [..., outputs], summed over ranks; the bias is added once, after the sum."""

    def __init__(self, name: str, inputs: int, outputs: int, *, bias: bool, placement: LayerContext) -> None:
        self._name = name
        self._group = placement.group
        self._inputs = shard_evenly(name, inputs, placement)
        self._shape = (outputs, inputs)
        self.weight = make_weight(outputs, self._inputs.stop - self._inputs.start, placement)
        self.bias = placement.empty(outputs) if bias else None

    def __call__(self, x: Activations) -> torch.Tensor:
        if self._group.size == 1:
            return self.weight.product(x, self.bias)
        total = self._group.all_reduce(self.weight.product(x))
        return total if self.bias is None else total + self.bias

    def pieces(self, prefix: str) -> Iterator[Piece]:
        """Parts of the checkpoint that fill this layer."""
        cut = self._inputs
        [rows] = self.weight.split([self._shape[0]])
        name = f"{prefix}{self._name}.weight"
        yield Piece(name, self._shape, 1, cut.start, cut.stop, rows.values, rows.scales)
        if self.bias is not None:
            yield whole(f"{prefix}{self._name}.bias", self.bias)
