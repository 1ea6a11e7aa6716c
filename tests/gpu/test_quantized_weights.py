"""Products with block FP8 and int4 weights on a GPU, by every kernel and the library, against float64; and tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bf16_engine import error_of, tie_of
from fp8_checkpoints import PROMPTS, generate_greedy
from kernel_device import TOLERANCE, error
from quantized_checkpoints import load_dequantized_reference
from quantized_formats import FORMATS, Tensors, write_checkpoint
from tiny_models import make_model, oracle_logits

from skiff_runtime.kernels.constants import FP8_BLOCK
from skiff_runtime.kernels.fp8 import block_fp8_linear, quantize_grouped_activations
from skiff_runtime.kernels.fp8_tensors import BlockFP8Weight, quantize_rows
from skiff_runtime.kernels.int4_tensors import Int4Weight, pack_int4
from skiff_runtime.kernels.w4a16 import int4_linear

pytestmark = pytest.mark.gpu

TOKENS = [1, 2, 5, 16, 33, 64, 65, 68, 257, 1024]
"""Numbers of tokens at which another kernel takes over, and those beside them."""
SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "shard_size": "1MB",
}


def noise(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("outputs, inputs", [(128, 128), (1280, 4096), (192, 1296), (4096, 14336)])
@pytest.mark.parametrize("bias", [False, True])
def test_block_fp8_linear_equals_the_product(
    tokens: int, outputs: int, inputs: int, bias: bool, dtype: torch.dtype
) -> None:
    x = quantize_grouped_activations(noise(tokens, inputs, dtype=dtype, seed=tokens) * 3)
    values, _ = quantize_rows(noise(outputs, inputs, dtype=torch.float32, seed=1))
    blocks, columns = -(-outputs // FP8_BLOCK), -(-inputs // FP8_BLOCK)
    scales = torch.zeros((blocks, -(-columns // 4) * 4), device="cuda")
    # So small that no output is beyond float16.
    scales[:, :columns] = (noise(blocks, columns, dtype=torch.float32, seed=3).abs() + 0.1) / 100
    counters = torch.zeros(outputs, dtype=torch.int32, device="cuda")
    added = noise(outputs, dtype=dtype, seed=2) if bias else None
    wide = scales.double().repeat_interleave(FP8_BLOCK, 1)[:, :inputs]
    exact = values.double() * wide.repeat_interleave(FP8_BLOCK, 0)[:outputs]
    given = x.values.double() * x.scales.double().repeat_interleave(FP8_BLOCK, 1)[:, :inputs]
    expected = given @ exact.T + (0 if added is None else added.double())
    weight = BlockFP8Weight(values, scales, counters)
    for _ in range(2):
        found = block_fp8_linear(x, weight, added)
        assert found.dtype == dtype and found.shape == (tokens, outputs)
        assert error(found, expected) < TOLERANCE[torch.bfloat16 if dtype == torch.float16 else dtype]
        assert not counters.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("outputs, inputs", [(64, 128), (1280, 4096), (192, 1152), (4096, 14336)])
def test_int4_linear_equals_the_product(
    tokens: int, outputs: int, inputs: int, zeros: bool, group_size: int | None, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(outputs)
    integers = torch.randint(0, 16, (outputs, inputs), generator=generator).to(torch.uint8)
    groups = 1 if group_size is None else inputs // group_size
    scales = (torch.rand((outputs, groups), generator=generator) + 0.5).to(dtype)
    points = torch.randint(0, 16, (outputs, groups), generator=generator).to(dtype)
    size = group_size or inputs
    wide_points, wide_scales = (each.double().repeat_interleave(size, 1) for each in (points, scales))
    exact = ((integers.double() - (wide_points if zeros else 8.0)) * wide_scales).cuda()
    weight = Int4Weight(
        words=pack_int4(integers).cuda(),
        scales=scales.cuda(),
        zeros=points.cuda() if zeros else None,
        inputs=inputs,
        group_size=group_size,
        order=None,
        tile_counters=torch.zeros(outputs, dtype=torch.int32, device="cuda"),
    )
    x, bias = noise(tokens, inputs, dtype=dtype, seed=tokens), noise(outputs, dtype=dtype, seed=2)
    for added in (None, bias):
        found = int4_linear(x, weight, added)
        expected = x.double() @ exact.T + (0 if added is None else added.double())
        assert found.dtype == dtype and found.shape == (tokens, outputs)
        assert error(found, expected) < TOLERANCE[dtype]
        assert not weight.tile_counters.any()


@pytest.mark.parametrize("name", FORMATS)
def test_greedy_tokens_equal_transformers_but_for_near_ties(tmp_path: Path, name: str) -> None:
    """Near ties are found as in ``test_engine``; prompts are chunked, so products of one and of many tokens are made."""
    plain, ready = (make_model(tmp_path / kind, "qwen2", **SHAPE) for kind in ("plain", "ready"))
    weights = write_checkpoint(ready, FORMATS[name])
    outputs = generate_greedy(ready, device="cuda", dtype="bfloat16")
    exact, rounded = (
        torch.cat(oracle_logits(_reference(plain, weights, name, dtype), PROMPTS, outputs)).cpu().double()
        for dtype in (torch.float32, torch.bfloat16)
    )
    chosen = torch.tensor(outputs).flatten()
    gaps = (rounded.amax(-1) - rounded.gather(1, chosen[:, None]).squeeze(1)) / rounded.abs().amax(-1)
    assert float(gaps.max()) <= tie_of(error_of(rounded, exact))


def _reference(plain: Path, weights: Tensors, name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """Return transformers' model with these weights on the GPU, in ``dtype``."""
    oracle = load_dequantized_reference(plain, weights, FORMATS[name].activations).to(dtype).cuda()

    def compute(ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return oracle(ids.cuda(), attention_mask=attention_mask.cuda())

    return compute
