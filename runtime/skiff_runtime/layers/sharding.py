"""Where a rank's weights live, and how a checkpoint's tensor is cut for it."""

import math
from dataclasses import dataclass, field, replace

import torch

from skiff_runtime.config import Quantization
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.layers.projections import Product, UnquantizedProjections


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Type, device and rank of everything that one model allocates; ``quantization`` is of linear layers' matrices.

    Where there is one, what these are multiplied with is cut at ``activation_scale_ub`` when it is rounded. Matrices of
    the products ``unquantized`` have none for all that.
    """

    dtype: torch.dtype
    device: torch.device
    group: TensorParallelGroup = field(default_factory=TensorParallelGroup)
    quantization: Quantization = "none"
    activation_scale_ub: float = math.inf
    unquantized: UnquantizedProjections = ()

    def of(self, layer: int, product: Product) -> "LayerContext":
        """That of one product's matrix, and of what is multiplied with it."""
        return replace(self, quantization="none") if (layer, product) in self.unquantized else self

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialized weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part ``start`` to ``stop`` along ``dim`` of the checkpoint tensor ``name``, and where it goes.

    ``shape`` is that of the whole tensor in the checkpoint; ``target`` is a view of the
    rank's weight with the part's shape. Where it is in e4m3, ``scales`` float32 [rows of the target, 1] belong to it.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    target: torch.Tensor
    scales: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the part takes on the rank."""
        return self.target.nbytes + (0 if self.scales is None else self.scales.nbytes)


def whole(name: str, target: torch.Tensor) -> Piece:
    """A tensor that every rank holds entirely."""
    return Piece(name, tuple(target.shape), 0, 0, target.shape[0], target)
