"""Experts' MLPs as a whole against float64: any number of tokens, formats, windows, padding rows, repeated runs."""

from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE, HALF, TOLERANCE, combine, error, noise
from moe_reference import Format, exact_experts, make_experts, route, take_window

from skiff_runtime.kernels.fp8_tensors import QuantizedActivations
from skiff_runtime.kernels.triton.fp8.quantize import quantize_activations
from skiff_runtime.kernels.triton.moe.fused_experts import EXACT_RULE, choose_rule, fit_rule, fused_experts
from skiff_runtime.kernels.tuning import tuning_for

pytestmark = pytest.mark.usefixtures("poisoned")

TOKENS = (1, 2, 5, 21) if DEVICE.type == "cpu" else (1, 2, 5, 33, 64, 257, 1000, 3000)
FP8_TOLERANCE = 2e-2
"""A value between the products that is nearly in the middle of two FP8 numbers may become either of them."""

SMALL_FP8_SIZES: dict[Format, tuple[int, int, int]] = {"fp8": (80, 48, 2), "block_fp8": (256, 128, 1)}
"""Hidden size, inner size and top_k for the interpreter: blocks of 128 leave no smaller sizes with several of them."""


@pytest.mark.parametrize(
    ("tokens", "size", "dtype"), combine(TOKENS, [(8, 2), (128, 8)], [torch.float32, HALF])
)
def test_outputs_equal_the_reference(tokens: int, size: tuple[int, int], dtype: torch.dtype) -> None:
    experts, top_k = size
    weights = make_experts(experts, 64, 32, dtype)
    x, routing = noise(tokens, 64, dtype=dtype), route(tokens, experts, top_k)
    output = fused_experts(x, weights, *routing)
    assert output.shape == x.shape and output.dtype == dtype
    assert error(output, exact_experts(x, weights, *routing)) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("weight_format", ["fp8", "block_fp8"])
def test_fp8_outputs_equal_the_reference(tokens: int, weight_format: Format) -> None:
    hidden, inner, top_k = SMALL_FP8_SIZES[weight_format] if DEVICE.type == "cpu" else (256, 128, 2)
    weights = make_experts(16, hidden, inner, HALF, weight_format)
    x, routing = noise(tokens, hidden, dtype=HALF), route(tokens, 16, top_k)
    output = fused_experts(x, weights, *routing)
    assert output.shape == x.shape and output.dtype == HALF
    assert error(output, exact_experts(x, weights, *routing)) < FP8_TOLERANCE


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_activations_may_come_quantized(tokens: int) -> None:
    weights, routing = make_experts(8, 64, 32, HALF, "fp8"), route(tokens, 8, 2)
    x = noise(tokens, 64, dtype=HALF)
    quantized = quantize_activations(x)
    assert isinstance(quantized, QuantizedActivations)
    assert torch.equal(fused_experts(quantized, weights, *routing), fused_experts(x, weights, *routing))


@pytest.mark.parametrize("tokens", [1, 2, 30])
@pytest.mark.parametrize("weight_format", ["model", "fp8"])
def test_windows_of_experts_add_up_to_the_whole(tokens: int, weight_format: Format) -> None:
    weights, routing = make_experts(12, 64, 32, HALF, weight_format), route(tokens, 12, 3)
    x = noise(tokens, 64, dtype=HALF)
    parts = [fused_experts(x, take_window(weights, first, 4), *routing) for first in (0, 4, 8)]
    total = sum(part.double() for part in parts)
    assert isinstance(total, torch.Tensor)
    assert error(total, fused_experts(x, weights, *routing)) < 2 * TOLERANCE[HALF]


@pytest.mark.parametrize("tokens", [2, 30])
def test_uneven_routing(tokens: int) -> None:
    weights, x = make_experts(8, 64, 32, HALF), noise(tokens, 64, dtype=HALF)
    for ids in ([3, 4], [7, 0]):
        routing = route(tokens, 8, 2)[0], torch.tensor([ids] * tokens, dtype=torch.int32, device=DEVICE)
        assert error(fused_experts(x, weights, *routing), exact_experts(x, weights, *routing)) < 2e-3 * (
            1 if torch.float16 == HALF else 8
        )


@pytest.mark.parametrize("tokens", [3, 30])
def test_rows_do_not_depend_on_padding_rows(tokens: int) -> None:
    """Padding rows contain anything and route like others, also all to the experts of real rows."""
    weights, (topk_weights, ids) = make_experts(64, 64, 32, HALF), route(tokens, 64, 4)
    x = noise(tokens, 64, dtype=HALF)
    expected = fused_experts(x, weights, topk_weights, ids)
    x[1:] = torch.nan
    ids[1:] = ids[0]
    topk_weights[1:] = torch.nan
    assert torch.equal(fused_experts(x, weights, topk_weights, ids)[0], expected[0])


def test_repeated_runs_give_the_same_bits() -> None:
    weights, routing = make_experts(8, 64, 32, HALF), route(40, 8, 4)
    x = noise(40, 64, dtype=HALF)
    first = fused_experts(x, weights, *routing)
    for _ in range(2 if DEVICE.type == "cpu" else 200):
        assert torch.equal(fused_experts(x, weights, *routing), first)


def test_no_tokens() -> None:
    weights, routing = make_experts(8, 64, 32, HALF), route(0, 8, 2)
    assert fused_experts(noise(0, 64, dtype=HALF), weights, *routing).shape == (0, 64)


def test_unsupported_blocks_are_refused() -> None:
    weights = make_experts(2, 128, 128, HALF, "block_fp8")
    x, routing = noise(1, 128, dtype=HALF), route(1, 2, 1)
    for broken in (
        replace(weights, block_shape=(64, 128)),
        replace(weights, down=weights.down[:, :, :64], gate_up=weights.gate_up[:, :128]),
    ):
        with pytest.raises(ValueError, match="blocks of 128 x 128"):
            fused_experts(x, broken, *routing)


def test_rules_follow_the_mean_number_of_rows() -> None:
    tuning = tuning_for(DEVICE).moe
    experts = make_experts(8, 32, 16, HALF)
    for rule in tuning.rules[:-1]:
        assert rule.max_rows is not None
        assert choose_rule(int(rule.max_rows * 8), experts) is rule
        assert choose_rule(int(rule.max_rows * 8) + 1, experts) is not rule
    assert choose_rule(10**6, experts) is tuning.rules[-1]
    assert choose_rule(10**6, make_experts(8, 32, 16, HALF, "fp8")) is tuning.fp8_rules[-1]
    assert choose_rule(9, make_experts(1, 128, 128, HALF, "block_fp8")).rows == 32
    assert choose_rule(9, make_experts(8, 32, 16, torch.float32)) is EXACT_RULE


@pytest.mark.parametrize("shared_kib", [99, 163, 227])
def test_rules_fit_into_the_shared_memory_of_smaller_gpus(shared_kib: int) -> None:
    """Those of the H200 as they are; blocks of 128 inputs stay whole in FP8, whose scales depend on them."""
    tuning, limit = tuning_for(DEVICE).moe, shared_kib << 10
    for rules, itemsize in ((tuning.rules, 2), (tuning.fp8_rules, 1), (tuning.block_fp8_rules, 1)):
        for rule in rules:
            fitted = fit_rule(rule, itemsize, limit)
            assert fitted == rule or shared_kib < 227
            for tile, tuned, weights in ((fitted.gate_up, rule.gate_up, 2), (fitted.down, rule.down, 1)):
                assert tile.stages * tile.inputs * (rule.rows + weights * tile.outputs) * itemsize <= limit
                assert tile.stages >= 2 and tile.inputs >= 64
                assert tile.inputs == tuned.inputs or itemsize == 2
