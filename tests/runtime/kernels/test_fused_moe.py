"""The reference of mixture of experts against plain loops in float64: routing, experts, shards of both kinds, FP8."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from skiff_runtime.kernels.fp8 import quantize_activations, quantize_grouped_activations
from skiff_runtime.kernels.fp8_tensors import quantize_groups, quantize_rows
from skiff_runtime.kernels.fused_moe import (
    ExpertWeights,
    compute_router_logits,
    fused_experts,
    fused_topk,
)

HIDDEN, INNER = 24, 20
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[list[float]], int]:
    """Draw logits of a few tokens, most of them with ties, and a top-k."""
    experts = draw(st.integers(1, 12))
    values = st.one_of(st.integers(-2, 2).map(float), st.floats(-80, 80, width=32))
    rows = st.lists(st.lists(values, min_size=experts, max_size=experts), min_size=1, max_size=5)
    return draw(rows), draw(st.integers(1, experts))


@given(routings(), st.booleans())
@settings(max_examples=200)
def test_top_k_takes_the_largest_logits_and_the_lower_id_of_equal_ones(
    routing: tuple[list[list[float]], int], renormalize: bool
) -> None:
    rows, top_k = routing
    weights, ids = fused_topk(torch.tensor(rows), top_k, renormalize=renormalize)
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    assert weights.is_contiguous() and ids.is_contiguous()
    for row, found, chosen in zip(rows, weights.tolist(), ids.tolist(), strict=True):
        expected = sorted(range(len(row)), key=lambda expert: (-row[expert], expert))[:top_k]
        assert chosen == expected
        exponentials = [math.exp(logit - max(row)) for logit in row]
        total = sum(exponentials[expert] for expert in (expected if renormalize else range(len(row))))
        assert found == pytest.approx([exponentials[expert] / total for expert in expected], rel=1e-5)


def test_ids_are_valid_where_logits_are_nan() -> None:
    logits = torch.tensor([[torch.nan] * 6, [0.0, torch.nan, 1.0, -torch.inf, torch.inf, 2.0]])
    _, ids = fused_topk(logits, 4, renormalize=True)
    for row in ids.tolist():
        assert len(set(row)) == 4 and set(row) <= set(range(6))


def test_router_logits_are_not_rounded_to_the_type_of_the_model() -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(rows, 64).bfloat16() for rows in (5, 7))
    logits = compute_router_logits(x, weight)
    exact = x.double() @ weight.double().T
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)


def make_experts(count: int, dtype: torch.dtype = torch.float32) -> ExpertWeights:
    gate_up = torch.randn(count, 2 * INNER, HIDDEN) / HIDDEN**0.5
    down = torch.randn(count, HIDDEN, INNER) / INNER**0.5
    return ExpertWeights(gate_up.to(dtype), down.to(dtype))


def route(tokens: int, experts: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return fused_topk(torch.randn(tokens, experts) * 2, top_k, renormalize=True)


def loop_over_experts(
    x: torch.Tensor, experts: ExpertWeights, weights: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Compute what ``fused_experts`` does for unquantized matrices, pair by pair in float64."""
    total = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    for token, row in enumerate(ids.tolist()):
        for choice, expert in enumerate(row):
            index = expert - experts.first_expert
            if not 0 <= index < len(experts.gate_up):
                continue
            gate, up = (experts.gate_up[index].double() @ x[token].double()).chunk(2)
            activated = gate * torch.sigmoid(gate) * up
            total[token] += float(weights[token, choice]) * (experts.down[index].double() @ activated)
    return total


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "count", "top_k"), [(1, 4, 1), (1, 16, 8), (7, 8, 3), (33, 16, 16), (50, 2, 1)]
)
def test_experts_equal_a_loop_in_float64(tokens: int, count: int, top_k: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    experts, x = make_experts(count, dtype), torch.randn(tokens, HIDDEN).to(dtype)
    weights, ids = route(tokens, count, top_k)
    result = fused_experts(x, experts, weights, ids)
    assert result.shape == x.shape and result.dtype == dtype
    assert error(result, loop_over_experts(x, experts, weights, ids)) < TOLERANCE[dtype]


@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 4), st.integers(0, 1000))
@settings(max_examples=50)
def test_parts_of_ranks_add_up_to_the_whole(tokens: int, share: int, ranks: int, seed: int) -> None:
    """A rank holds some experts, and adds nothing for the others; or it holds some columns of each."""
    torch.manual_seed(seed)
    count = share * ranks
    experts, x = make_experts(count), torch.randn(tokens, HIDDEN)
    weights, ids = route(tokens, count, min(3, count))
    whole = loop_over_experts(x, experts, weights, ids)
    by_expert = [
        ExpertWeights(
            experts.gate_up[first : first + share], experts.down[first : first + share], first_expert=first
        )
        for first in range(0, count, share)
    ]
    columns = [slice(start, start + INNER // 4) for start in range(0, INNER, INNER // 4)]
    by_column = [
        ExpertWeights(
            experts.gate_up.view(count, 2, INNER, HIDDEN)[:, :, each].flatten(1, 2), experts.down[:, :, each]
        )
        for each in columns
    ]
    for parts in (by_expert, by_column):
        results = [fused_experts(x, part, weights, ids) for part in parts]
        assert error(torch.stack(results).sum(0), whole) < 1e-5
    for part in by_expert:
        expected = loop_over_experts(x, part, weights, ids)
        torch.testing.assert_close(
            fused_experts(x, part, weights, ids).double(), expected, rtol=1e-4, atol=1e-5
        )


def test_result_of_a_token_does_not_depend_on_other_tokens() -> None:
    torch.manual_seed(4)
    experts, x = make_experts(8), torch.randn(20, HIDDEN)
    weights, ids = route(20, 8, 3)
    together = fused_experts(x, experts, weights, ids)
    for token in range(20):
        row = slice(token, token + 1)
        alone = fused_experts(x[row], experts, weights[row], ids[row])
        torch.testing.assert_close(alone, together[row], rtol=1e-5, atol=1e-6)


def quantize(experts: ExpertWeights) -> ExpertWeights:
    gate_up, gate_up_scales = quantize_rows(experts.gate_up.flatten(0, 1))
    down, down_scales = quantize_rows(experts.down.flatten(0, 1))
    return ExpertWeights(
        gate_up.view(experts.gate_up.shape),
        down.view(experts.down.shape),
        gate_up_scales.view(experts.gate_up.shape[:2]),
        down_scales.view(experts.down.shape[:2]),
    )


def dequantize(experts: ExpertWeights) -> ExpertWeights:
    assert experts.gate_up_scales is not None and experts.down_scales is not None
    return ExpertWeights(
        experts.gate_up.float() * experts.gate_up_scales[:, :, None],
        experts.down.float() * experts.down_scales[:, :, None],
    )


@pytest.mark.parametrize("ready", [False, True], ids=["quantized here", "quantized before"])
def test_fp8_experts_equal_the_products_of_the_quantized_values(ready: bool) -> None:
    """The activations between the products are quantized, too; one expert at a time shows with which scales."""
    torch.manual_seed(5)
    experts, x = quantize(make_experts(4)), torch.randn(9, HIDDEN) * 3
    values, scales = quantize_rows(x)
    exact = dequantize(experts)
    given_x = quantize_activations(x) if ready else x
    for expert in range(4):
        ids = torch.full((9, 1), expert, dtype=torch.int32)
        gate, up = ((values.double() * scales.double()) @ exact.gate_up[expert].double().T).chunk(2, dim=1)
        activated, activated_scales = quantize_rows((gate * torch.sigmoid(gate) * up).float())
        expected = (activated.double() * activated_scales.double()) @ exact.down[expert].double().T
        result = fused_experts(given_x, experts, torch.ones(9, 1), ids)
        # A last bit of float32 may round an activation to the next FP8 number.
        assert error(result, expected) < 5e-3
    weights, ids = route(9, 4, 2)
    assert (
        error(fused_experts(given_x, experts, weights, ids), loop_over_experts(x, exact, weights, ids)) < 0.06
    )


def quantize_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize [experts, outputs, inputs] with a scale for each 128 x 128 block."""
    count, outputs, inputs = weight.shape
    blocks = weight.view(count, outputs // 128, 128, inputs // 128, 128).transpose(2, 3)
    values, scales = quantize_rows(blocks.reshape(-1, 128 * 128))
    return values.view(blocks.shape).transpose(2, 3).reshape(weight.shape), scales.view(blocks.shape[:3])


def round_groups(x: torch.Tensor) -> torch.Tensor:
    """Quantize and dequantize each 128 elements of a row, to float64."""
    values, scales = quantize_groups(x.float())
    return values.double() * scales.double().repeat_interleave(128, 1)


@pytest.mark.parametrize("ready", [False, True], ids=["quantized here", "quantized before"])
def test_block_fp8_experts_equal_the_products_of_the_quantized_values(ready: bool) -> None:
    """Weights have a scale for each 128 x 128 block, and activations one for each 128 elements of a token or pair."""
    torch.manual_seed(6)
    x, magnitudes = torch.randn(9, 256) * 3, torch.rand(3, 1, 256) + 0.1
    gate_up, gate_up_scales = quantize_blocks(torch.randn(3, 512, 256) * magnitudes / 16)
    down, down_scales = quantize_blocks(torch.randn(3, 256, 256) * magnitudes / 16)
    experts = ExpertWeights(gate_up, down, gate_up_scales, down_scales, block_shape=(128, 128))
    exact_gate_up, exact_down = (
        values.double() * scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        for values, scales in ((gate_up, gate_up_scales), (down, down_scales))
    )
    given_x = quantize_grouped_activations(x) if ready else x
    outputs = []
    for expert in range(3):
        gate, up = (round_groups(x) @ exact_gate_up[expert].T).chunk(2, dim=1)
        outputs.append(round_groups(gate * torch.sigmoid(gate) * up) @ exact_down[expert].T)
        ids = torch.full((9, 1), expert, dtype=torch.int32)
        # A last bit of float32 may round an activation to the next FP8 number.
        assert error(fused_experts(given_x, experts, torch.ones(9, 1), ids), outputs[-1]) < 5e-3
    weights, ids = route(9, 3, 2)
    chosen = torch.stack(outputs, dim=1)[torch.arange(9)[:, None], ids.long()]
    expected = (chosen * weights[:, :, None]).sum(1)
    assert error(fused_experts(given_x, experts, weights, ids), expected) < 5e-3


def test_experts_of_other_ranks_alone_give_zeros() -> None:
    experts = replace(make_experts(2), first_expert=6)
    weights, ids = torch.ones(3, 2) / 2, torch.tensor([[0, 5], [8, 1], [2, 3]], dtype=torch.int32)
    assert not fused_experts(torch.randn(3, HIDDEN), experts, weights, ids).any()
