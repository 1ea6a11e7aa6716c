"""The gated feed-forward block (SwiGLU) of a decoder layer."""

from collections.abc import Iterator

from skiff_runtime.kernels.activation import silu_and_mul
from skiff_runtime.kernels.fp8 import Activations, silu_and_mul_quantize
from skiff_runtime.layers.linear import ColumnParallelLinear, RowParallelLinear, shard_evenly
from skiff_runtime.layers.partial_sum import LayerOutput
from skiff_runtime.layers.sharding import LayerContext, WeightShard


class GatedMLP:
    """[T, hidden] -> [T, hidden]: down(silu(gate(x)) * up(x)), gate and up in one matrix (Shazeer, 2020)."""

    def __init__(
        self, layer: int, hidden_size: int, intermediate_size: int, *, bias: bool, context: LayerContext
    ) -> None:
        up, down = context.for_projection(layer, "gate_up_proj"), context.for_projection(layer, "down_proj")
        modules = [shard_evenly(name, intermediate_size, context) for name in ("gate_proj", "up_proj")]
        self._quantizes = down.quantization == "fp8"
        self._scale_ub = down.activation_scale_ub
        self._gate_up_proj = ColumnParallelLinear(hidden_size, modules, bias=bias, context=up)
        self._down_proj = RowParallelLinear(
            "down_proj", intermediate_size, hidden_size, bias=bias, context=down
        )

    def __call__(self, x: Activations) -> LayerOutput:
        gate_up = self._gate_up_proj(x)
        if self._quantizes:  # by the same kernel that applies the activation
            return self._down_proj(silu_and_mul_quantize(gate_up, self._scale_ub))
        return self._down_proj(silu_and_mul(gate_up))

    def weight_shards(self, prefix: str) -> Iterator[WeightShard]:
        """Yield the shards of the checkpoint's tensors that fill this block."""
        yield from self._gate_up_proj.weight_shards(prefix)
        yield from self._down_proj.weight_shards(prefix)
