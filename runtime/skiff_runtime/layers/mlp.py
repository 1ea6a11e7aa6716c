"""MLPs of a decoder layer: their interface, and the gated one (SwiGLU)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from skiff_runtime.kernels.activation import silu_and_mul
from skiff_runtime.kernels.fp8 import Activations
from skiff_runtime.layers.activation_quantizer import make_activation_quantizer
from skiff_runtime.layers.linear import ColumnParallelLinear, RowParallelLinear, shard_evenly
from skiff_runtime.layers.lora import LoraLayer, split_deferred
from skiff_runtime.layers.norm import QuantizingRMSNorm
from skiff_runtime.layers.partial_sum import LayerOutput
from skiff_runtime.layers.sharding import LayerContext, WeightShard


class MLP(ABC):
    """The part of a decoder layer after attention: [T, hidden] -> [T, hidden].

    ``name`` is that of its module in the checkpoint, and ``input_context`` the context of its input, by which the norm
    before it quantizes.
    """

    name: str
    input_context: LayerContext

    @property
    def input_matrix(self) -> torch.Tensor | None:
        """The matrix that every token is multiplied with first, in the model's dtype; ``None`` if there is none."""
        return None

    @abstractmethod
    def __call__(self, x: Activations) -> LayerOutput:
        """Compute the MLP of T tokens; see ``LayerOutput`` for what may be left to the norm behind it."""

    def apply_after_norm(
        self, norm: QuantizingRMSNorm, x: LayerOutput, residual: torch.Tensor
    ) -> tuple[LayerOutput, torch.Tensor]:
        """Return (the MLP of norm(x + residual), x + residual); ``norm`` is one of this MLP's ``input_context``."""
        normed, total = norm.add_and_normalize(x, residual, self.input_matrix)
        return self(normed), total

    @abstractmethod
    def weight_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield the shards of the checkpoint's tensors that fill this block; their names begin with ``prefix``."""

    def lora_layers(self, prefix: str) -> Iterator[tuple[str, LoraLayer]]:
        """Yield the LoRA matrices of the block's linear layers, with the prefix of their modules' names; experts have none."""
        yield from ()


class GatedMLP(MLP):
    """[T, hidden] -> [T, hidden]: down(silu(gate(x)) * up(x)), gate and up in one matrix (Shazeer, 2020)."""

    def __init__(
        self, layer: int, hidden_size: int, intermediate_size: int, *, bias: bool, context: LayerContext
    ) -> None:
        up, down = context.for_projection(layer, "gate_up_proj"), context.for_projection(layer, "down_proj")
        self.name = "mlp"
        self.input_context = up
        modules = [shard_evenly(name, intermediate_size, context) for name in ("gate_proj", "up_proj")]
        self._quantizer = make_activation_quantizer(down)
        self._context = context
        self._gate_up_proj = ColumnParallelLinear(hidden_size, modules, bias=bias, context=up)
        self._down_proj = RowParallelLinear(
            "down_proj", intermediate_size, hidden_size, bias=bias, context=down
        )

    @property
    def input_matrix(self) -> torch.Tensor | None:
        return self._gate_up_proj.weight.unquantized

    def __call__(self, x: Activations) -> LayerOutput:
        product = self._gate_up_proj.fused_silu_and_mul(x)
        if product is not None:
            return self._down_proj(product if self._quantizer is None else self._quantizer.quantize(product))
        gate_up, expand = split_deferred(self._gate_up_proj(x))
        if (
            self._quantizer is not None and not self._context.has_adapters
        ):  # LoRA reads the product unquantized
            # By the same kernel that applies the activation.
            return self._down_proj(self._quantizer.silu_and_mul(gate_up))
        return self._down_proj(silu_and_mul(gate_up, expand))

    def weight_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield the shards of the checkpoint's tensors that fill this block."""
        yield from self._gate_up_proj.weight_shards(prefix)
        yield from self._down_proj.weight_shards(prefix)

    def lora_layers(self, prefix: str) -> Iterator[tuple[str, LoraLayer]]:
        yield from self._gate_up_proj.lora_layers(prefix)
        yield from self._down_proj.lora_layers(prefix)
