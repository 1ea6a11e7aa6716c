"""Sharding of weights: the settings by which a rank allocates its layers, and its shard of a checkpoint's tensor."""

import math
from dataclasses import dataclass, field, replace

import torch

from skiff_runtime.config import Quantization
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.layers.projections import Projection, UnquantizedProjections


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Dtype, device, rank and quantization by which one rank allocates the layers of a model.

    ``quantization`` holds for the matrices of linear layers, except for the projections in ``unquantized``. Where
    there is one, ``activation_scale_ub`` bounds the largest magnitude from which an activation's scale is computed.
    With ``expert_parallel`` a rank holds some of the experts of a mixture, otherwise some columns of each.
    """

    dtype: torch.dtype
    device: torch.device
    group: TensorParallelGroup = field(default_factory=TensorParallelGroup)
    quantization: Quantization = "none"
    activation_scale_ub: float = math.inf
    unquantized: UnquantizedProjections = ()
    expert_parallel: bool = False

    def for_projection(self, layer: int, projection: Projection) -> "LayerContext":
        """Return the context of one projection's matrix and of its input."""
        return self.without_quantization() if (layer, projection) in self.unquantized else self

    def without_quantization(self) -> "LayerContext":
        """Return the context of a matrix, and of its input, that is in the model's dtype in any case."""
        return replace(self, quantization="none")

    def empty(self, *shape: int) -> torch.Tensor:
        """Allocate an uninitialized weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class StackedTensor:
    """A checkpoint tensor ``name`` of ``shape`` [experts, rows, columns] that stacks matrices of several modules.

    A module's matrix begins at ``first_row`` of all [experts * rows].
    """

    name: str
    shape: tuple[int, int, int]
    first_row: int


@dataclass(frozen=True, slots=True)
class WeightShard:
    """Indices ``start`` to ``stop`` along ``dim`` of the checkpoint tensor ``name``, and the memory to fill with them.

    ``shape`` is that of the whole tensor in the checkpoint. ``target`` is a view of the rank's weight, of the shard's
    shape. Where it is FP8, ``scales`` float32 [rows of the target, 1] belong to it. A checkpoint without the tensor may
    have it as a part of ``stacked``.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    target: torch.Tensor
    scales: torch.Tensor | None = None
    stacked: StackedTensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the shard takes on the rank."""
        return self.target.nbytes + (0 if self.scales is None else self.scales.nbytes)


def replicated_weight(name: str, target: torch.Tensor) -> WeightShard:
    """Return the shard of a tensor that every rank holds as a whole."""
    return WeightShard(name, tuple(target.shape), 0, 0, target.shape[0], target)
