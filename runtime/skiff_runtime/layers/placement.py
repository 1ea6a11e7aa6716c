"""Where a rank's weights live, and how a checkpoint's tensor is cut for it."""

from dataclasses import dataclass, field

import torch

from skiff_runtime.distributed.group import TensorParallel


@dataclass(frozen=True, slots=True)
class Placement:
    """Type, device and rank of everything that one model allocates."""

    dtype: torch.dtype
    device: torch.device
    group: TensorParallel = field(default_factory=TensorParallel)

    def empty(self, *shape: int) -> torch.Tensor:
        """An uninitialized weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class Piece:
    """The part ``start`` to ``stop`` along ``dim`` of the checkpoint tensor ``name``, and where it goes.

    ``shape`` is that of the whole tensor in the checkpoint; ``target`` is a view of the
    rank's weight with the part's shape.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    target: torch.Tensor


def whole(name: str, target: torch.Tensor) -> Piece:
    """A tensor that every rank holds entirely."""
    return Piece(name, tuple(target.shape), 0, 0, target.shape[0], target)
