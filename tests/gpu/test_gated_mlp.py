"""A gated MLP of one token at the sizes of served models: with SwiGLU in the GEMV of gate and up, and without.

Both ways take the same tiles here, so that a row is summed up in the same order.
"""

from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE, noise
from weight_shards import fill_shard

from skiff_runtime.config import QuantizationOption
from skiff_runtime.kernels.tuning import overridden, tuning_for
from skiff_runtime.layers.mlp import GatedMLP
from skiff_runtime.layers.sharding import LayerContext

pytestmark = pytest.mark.gpu


def make_mlp(
    hidden: int, inner: int, dtype: torch.dtype, *, bias: bool, quantization: QuantizationOption
) -> GatedMLP:
    mlp = GatedMLP(
        0,
        hidden,
        inner,
        bias=bias,
        context=LayerContext(dtype, torch.device("cuda", 0), quantization=quantization),
    )
    for seed, shard in enumerate(mlp.weight_shards("mlp.")):
        values = noise(*shard.target.shape, dtype=torch.float32, seed=seed)
        fill_shard(shard, values * (2 / shard.shape[-1] ** 0.5))
    return mlp


@pytest.mark.parametrize("quantization", ["none", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "hidden, inner, bias",
    [
        (1024, 3072, False),
        (4096, 14336, False),
        (5120, 12800, True),
        (5120, 17408, False),
        (8192, 3584, True),
    ],
)
def test_fused_swiglu_has_the_bits_of_a_launch_of_its_own(
    hidden: int, inner: int, bias: bool, dtype: torch.dtype, quantization: QuantizationOption
) -> None:
    mlp = make_mlp(hidden, inner, dtype, bias=bias, quantization=quantization)
    tuning = tuning_for(DEVICE)
    for seed in range(3):
        x = noise(1, hidden, dtype=dtype, seed=100 + seed)
        outputs = []
        for fuse in (False, True):
            table = replace(
                tuning,
                gemv=replace(tuning.gemv, fuse_silu_and_mul=fuse, uneven_silu_tile=tuning.gemv.uneven_tile),
                fp8_gemv=replace(tuning.fp8_gemv, fuse_silu_and_mul=fuse),
            )
            with overridden(table), torch.inference_mode():
                output = mlp(x)
            assert isinstance(output, torch.Tensor)
            outputs.append(output)
        assert outputs[0].isfinite().all() and outputs[0].any()
        assert torch.equal(*outputs)
