"""Fills the weights of layers without a checkpoint."""

import torch

from skiff_runtime.kernels.fp8_tensors import quantize_rows
from skiff_runtime.layers.sharding import WeightShard


def fill_shard(shard: WeightShard, values: torch.Tensor) -> None:
    """Copy ``values``, of the target's shape, to the shard's target, quantized where that is FP8."""
    if shard.scales is None:
        shard.target.copy_(values)
    else:
        quantized, scales = quantize_rows(values)
        shard.target.copy_(quantized)
        shard.scales.copy_(scales)
