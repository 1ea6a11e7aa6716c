"""The gated feed-forward block of a decoder layer."""

from collections.abc import Iterator

import torch

from skiff_runtime.kernels.activation import silu_and_mul
from skiff_runtime.kernels.fp8 import Activations, silu_and_mul_quantize
from skiff_runtime.layers.linear import ColumnParallelLinear, RowParallelLinear, shard_evenly
from skiff_runtime.layers.sharding import LayerContext, Piece


class GatedMLP:
    """[T, hidden] -> [T, hidden]: down(silu(gate(x)) * up(x)), gate and up in one product (Shazeer, 2020)."""

    def __init__(
        self, layer: int, hidden_size: int, intermediate_size: int, *, bias: bool, placement: LayerContext
    ) -> None:
        into, back = placement.of(layer, "gate_up"), placement.of(layer, "down")
        cuts = [shard_evenly(name, intermediate_size, placement) for name in ("gate_proj", "up_proj")]
        self._rounds = back.quantization == "fp8"
        self._bound = back.activation_scale_ub
        self._gate_up = ColumnParallelLinear(hidden_size, cuts, bias=bias, placement=into)
        self._down = RowParallelLinear("down_proj", intermediate_size, hidden_size, bias=bias, placement=back)

    def __call__(self, x: Activations) -> torch.Tensor:
        gate_up = self._gate_up(x)
        if self._rounds:
            return self._down(silu_and_mul_quantize(gate_up, self._bound))
        return self._down(silu_and_mul(gate_up))

    def pieces(self, prefix: str) -> Iterator[Piece]:
        """Parts of the checkpoint that fill this block."""
        yield from self._gate_up.pieces(prefix)
        yield from self._down.pieces(prefix)
