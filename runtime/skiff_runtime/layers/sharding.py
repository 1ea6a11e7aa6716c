"""Sharding of weights: the settings by which a rank allocates its layers, and its shard of a checkpoint's tensor."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

import torch

from skiff_runtime.config import QuantizationOption
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.layers.lora import LoraState
from skiff_runtime.layers.projections import Projection, UnquantizedProjections
from skiff_runtime.layers.weight_format import WeightFormat, choose_weight_format


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Dtype, device, rank and quantization by which one rank allocates the layers of a model.

    ``quantization`` holds for the matrices of linear layers, except for the projections in ``unquantized``. Where
    there is one, ``activation_scale_ub`` bounds the largest magnitude from which an activation's scale is computed.
    ``stored_format`` is that of a quantized checkpoint; without one, weights are quantized at load.
    With ``expert_parallel`` a rank holds some of the experts of a mixture, otherwise some columns of each. ``lora``: None if
    adapters are not served.
    """

    dtype: torch.dtype
    device: torch.device
    group: TensorParallelGroup = field(default_factory=TensorParallelGroup)
    quantization: QuantizationOption = "none"
    activation_scale_ub: float = math.inf
    unquantized: UnquantizedProjections = ()
    stored_format: WeightFormat | None = None
    expert_parallel: bool = False
    lora: LoraState | None = None

    @property
    def weight_format(self) -> WeightFormat | None:
        """The format of a linear layer's matrix; ``None`` for the model's dtype."""
        return choose_weight_format(self.quantization, self.stored_format)

    def for_projection(self, layer: int, projection: Projection) -> "LayerContext":
        """Return the context of one projection's matrix and of its input."""
        return self.without_quantization() if (layer, projection) in self.unquantized else self

    def without_quantization(self) -> "LayerContext":
        """Return the context of a matrix, and of its input, that is in the model's dtype in any case."""
        return replace(self, quantization="none")

    @property
    def has_adapters(self) -> bool:
        """Return whether a token of the step that is computed now has a LoRA adapter."""
        return self.lora is not None and self.lora.is_active

    def on_meta_device(self) -> "LayerContext":
        """Return the context of the same layers without memory."""
        lora = None if self.lora is None else self.lora.on_meta_device()
        return replace(self, device=torch.device("meta"), lora=lora)

    def empty(self, *shape: int) -> torch.Tensor:
        """Allocate an uninitialized weight."""
        return torch.empty(shape, dtype=self.dtype, device=self.device)


class TensorConverter(ABC):
    """Conversion of a stored tensor that a rank keeps in another layout, or that is none of plain weights.

    ``dtypes`` are the safetensors names of those that it takes. The tensor is converted in runs of its rows (indices of
    its first dimension), each a multiple of ``rows_multiple`` but the last; 0 is the whole tensor at a time. All those
    that ``precedes`` marks are converted before any other, because others read the result.
    """

    dtypes: tuple[str, ...]
    rows_multiple: int = 1
    precedes: bool = False

    @abstractmethod
    def store(self, values: torch.Tensor, first: int) -> None:
        """Convert ``values``, rows of the shard from ``first`` on, and write them where they belong.

        They are in the file's dtype, on the rank's device. Threads call it for different rows at a time. Raises
        ``ModelError`` for values that cannot be right.
        """

    @abstractmethod
    def randomize(self, generator: torch.Generator) -> None:
        """Fill the rank's memory with random values of the usual magnitude, for a run without a checkpoint."""


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

    With a ``converter``, which then fills it, the target may be of any other shape. ``aliases`` are other names under
    which a checkpoint may store the tensor. One that is ``optional`` may be absent.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int
    target: torch.Tensor
    scales: torch.Tensor | None = None
    converter: TensorConverter | None = None
    aliases: tuple[str, ...] = ()
    optional: bool = False
    stacked: StackedTensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes that the shard takes on the rank."""
        return self.target.nbytes + (0 if self.scales is None else self.scales.nbytes)


def replicated_weight(name: str, target: torch.Tensor) -> WeightShard:
    """Return the shard of a tensor that every rank holds as a whole."""
    return WeightShard(name, tuple(target.shape), 0, 0, target.shape[0], target)
