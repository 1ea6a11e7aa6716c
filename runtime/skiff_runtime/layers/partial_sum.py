"""Partial sums: the outputs of row-parallel layers before their all-reduce, which the norm behind them completes.

A row-parallel layer and the norm behind it belong to different parts of a decoder layer, and one kernel computes the
all-reduce, the residual addition and the norm together. So the layer returns its part of the sum, as a type of its own
that cannot be mistaken for the sum, and the norm decides. For one token the product itself can be part of that kernel;
then the layer returns it before it is computed. The parts of many tokens are exchanged while they are computed; then the
layer returns both.
"""

from dataclasses import dataclass

import torch

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.kernels.linear import linear
from skiff_runtime.layers.lora import DeferredExpand


@dataclass(frozen=True, slots=True)
class PartialSum:
    """One rank's part [T, n] of a sum over the ranks of ``group``, to which ``bias`` [n] is added once."""

    part: torch.Tensor
    group: TensorParallelGroup
    bias: torch.Tensor | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.part)

    def reduce(self) -> torch.Tensor:
        """Return the sum [T, n]; the part may be overwritten."""
        total = self.group.all_reduce(self.part)
        return total if self.bias is None else total + self.bias


@dataclass(frozen=True, slots=True)
class PartialProduct:
    """A partial sum that is not computed yet: x [1, inputs] times matrix [n, inputs].

    ``group.can_fuse_linear`` is true for them.
    """

    x: torch.Tensor
    matrix: torch.Tensor
    group: TensorParallelGroup

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.x)

    def multiply(self) -> PartialSum:
        """Compute the product alone."""
        return PartialSum(linear(self.x, self.matrix), self.group)

    def reduce(self) -> torch.Tensor:
        """Return the sum [1, n] of the product over the ranks."""
        return self.multiply().reduce()


@dataclass(frozen=True, slots=True)
class ExchangedSum:
    """This rank's part [T, n] of a sum over two ranks and the other rank's, which is valid until the next exchange.

    ``bias`` [n] is added once.
    """

    part: torch.Tensor
    other: torch.Tensor
    bias: torch.Tensor | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.part)

    def reduce(self) -> torch.Tensor:
        """Return the sum [T, n], in the memory of the part."""
        total = self.part.add_(self.other)
        return total if self.bias is None else total.add_(self.bias)


LayerOutput = torch.Tensor | PartialSum | PartialProduct | ExchangedSum | DeferredExpand
"""The output of a block: complete, with more than one rank not yet summed, or without the adapters' products."""


def reduce_output(output: LayerOutput) -> torch.Tensor:
    """Return the complete output."""
    return output if isinstance(output, torch.Tensor) else output.reduce()
