"""Mixture of experts on a GPU at the sizes of a served model: float64, CUDA graphs with any routing, determinism."""

from dataclasses import replace

import pytest
import torch
from kernel_device import TOLERANCE, error, noise
from moe_reference import Format, exact_experts, make_experts, route, take_window

from skiff_runtime.kernels.fused_moe import (
    ROUTER_COUNTERS,
    ExpertWeights,
    add_rms_norm_route,
    fused_experts,
    fused_topk,
)
from skiff_runtime.kernels.rms_norm import add_rms_norm
from skiff_runtime.kernels.triton.linear.gemv import gemv
from skiff_runtime.kernels.triton.norm_act.rms_norm import row_warps
from skiff_runtime.kernels.tuning import GemvTile, overridden, tuning_for

pytestmark = pytest.mark.gpu

EXPERTS, TOP_K, HIDDEN, INNER = 128, 8, 2048, 768
BF16 = torch.bfloat16
FP8_TOLERANCE = 2.5e-2
"""A rounding error of an intermediate value may move it to the next FP8 number, which is 6% away."""
TOKENS = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64, 100, 128, 256, 300, 512, 777, 1024, 2048, 3000)


@pytest.fixture(scope="module", params=["model", "fp8", "block_fp8"])
def weight_format(request: pytest.FixtureRequest) -> Format:
    found: Format = request.param
    return found


@pytest.fixture(scope="module")
def experts(weight_format: Format) -> ExpertWeights:
    return make_experts(EXPERTS, HIDDEN, INNER, BF16, weight_format)


@pytest.mark.parametrize("tokens", TOKENS)
def test_outputs_equal_the_reference(tokens: int, experts: ExpertWeights, weight_format: Format) -> None:
    """The first, the last and some other tokens are compared, since float64 takes its time."""
    x, (topk_weights, ids) = noise(tokens, HIDDEN, dtype=BF16), route(tokens, EXPERTS, TOP_K)
    output = fused_experts(x, experts, topk_weights, ids)
    some = torch.unique(torch.tensor([0, tokens // 3, tokens // 2, tokens - 1]))
    at = some.to(x.device)
    expected = exact_experts(x[at], experts, topk_weights[at], ids[at])
    assert error(output[at], expected) < (2 * TOLERANCE[BF16] if weight_format == "model" else FP8_TOLERANCE)
    assert not output.isnan().any()


@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 64, 513])
def test_graphs_follow_the_routing_of_each_replay(tokens: int, experts: ExpertWeights) -> None:
    """A graph captured with one routing replays with others: spread, all to one set of experts, none of a window's."""
    window = take_window(experts, 32, 64)
    logits, x = noise(tokens, EXPERTS, dtype=torch.float32), noise(tokens, HIDDEN, dtype=BF16)

    def run() -> list[torch.Tensor]:
        topk_weights, ids = fused_topk(logits, TOP_K, renormalize=True)
        return [fused_experts(x, each, topk_weights, ids) for each in (experts, window)]

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    favored = torch.zeros(EXPERTS, device=logits.device)
    favored[100:108] = 100
    for seed, added in ((1, 0), (2, favored), (3, 0)):
        logits.copy_(noise(tokens, EXPERTS, dtype=torch.float32, seed=seed) + added)
        x.copy_(noise(tokens, HIDDEN, dtype=BF16, seed=seed + 10))
        for each in captured:
            each.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for found, expected in zip(captured, run(), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [1, 2])
def test_routers_of_few_tokens_have_the_bits_of_three_launches_in_every_replay(
    tokens: int, rows: int
) -> None:
    """Many routers in a graph, one behind the other, so that stale logits or counters of any of them would show."""
    layers, width = 24, HIDDEN
    x, residual = noise(tokens, width, dtype=BF16), noise(tokens, width, dtype=BF16, seed=1)
    norm_weight = noise(width, dtype=BF16, seed=2)
    weights = [noise(EXPERTS, width, dtype=BF16, seed=10 + layer) / width**0.5 for layer in range(layers)]
    counters = torch.zeros(layers, ROUTER_COUNTERS, dtype=torch.int32, device=x.device)

    def run() -> list[tuple[torch.Tensor, ...]]:
        found: list[tuple[torch.Tensor, ...]] = []
        total = residual
        for weight, own in zip(weights, counters, strict=True):
            found.append(
                add_rms_norm_route(x, total, norm_weight, 1e-6, weight, own, TOP_K, renormalize=True)
            )
            total = found[-1][1]
        return found

    def run_in_three_launches() -> list[tuple[torch.Tensor, ...]]:
        found: list[tuple[torch.Tensor, ...]] = []
        total = residual
        tile = GemvTile(width, warps=row_warps(width))
        for weight in weights:
            normed, total = add_rms_norm(x, total, norm_weight, 1e-6)
            logits = torch.cat([gemv(row[None], weight, tile=tile, dtype=torch.float32) for row in normed])
            found.append((normed, total, *fused_topk(logits, TOP_K, renormalize=True)))
        return found

    table = tuning_for(x.device)
    moe = replace(table.moe, max_router_topk_tokens=4, fuse_router_norm=True, router_topk_rows=rows)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    graph = torch.cuda.CUDAGraph()
    with overridden(replace(table, moe=moe)):
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            captured = run()
    for seed in range(100, 150):
        x.copy_(noise(tokens, width, dtype=BF16, seed=seed))
        residual.copy_(noise(tokens, width, dtype=BF16, seed=seed + 1000))
        for layer in captured:
            for each in layer:
                each.fill_(torch.nan if each.is_floating_point() else -1)
        graph.replay()
        graph.replay()
        torch.cuda.synchronize()
        assert not counters.any()
        for found, expected in zip(captured, run_in_three_launches(), strict=True):
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("tokens", [1, 4, 8, 64, 300, 2048])
def test_repeated_runs_give_the_same_bits(tokens: int, experts: ExpertWeights) -> None:
    x, routing = noise(tokens, HIDDEN, dtype=BF16), route(tokens, EXPERTS, TOP_K)
    first = fused_experts(x, experts, *routing)
    for _ in range(100):
        assert torch.equal(fused_experts(x, experts, *routing), first)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_products_quantize_to_the_bits_of_a_launch_that_does(tokens: int, experts: ExpertWeights) -> None:
    x, routing = noise(tokens, HIDDEN, dtype=BF16), route(tokens, EXPERTS, TOP_K)
    table, outputs = tuning_for(x.device), []
    for most in (0, 4):
        moe = replace(table.moe, quantizing_gate_up_tokens=most, quantizing_down_tokens=most)
        with overridden(replace(table, moe=moe)):
            outputs.append(fused_experts(x, experts, *routing))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("tokens", [4, 40])
def test_both_ways_agree(tokens: int, experts: ExpertWeights, weight_format: Format) -> None:
    """Few tokens give nearly the same output when they are sorted."""
    x, routing = noise(tokens, HIDDEN, dtype=BF16), route(tokens, EXPERTS, TOP_K)
    outputs = []
    for bound in (0, 10**6):
        table = tuning_for(x.device)
        with overridden(replace(table, moe=replace(table.moe, experts_per_pair=bound))):
            outputs.append(fused_experts(x, experts, *routing))
    assert error(*outputs) < (TOLERANCE[BF16] if weight_format == "model" else FP8_TOLERANCE)


@pytest.mark.parametrize("inner", [384, 192])
def test_shards_of_experts_add_up(inner: int) -> None:
    """Tensor parallelism: each rank has some columns of every expert."""
    whole = make_experts(16, 512, 2 * inner, BF16)
    for tokens in (1, 3, 200):
        x, routing = noise(tokens, 512, dtype=BF16), route(tokens, 16, 4)
        total = torch.zeros(tokens, 512, dtype=torch.float64, device=x.device)
        for rank in range(2):
            columns = slice(rank * inner, (rank + 1) * inner)
            gate, up = whole.gate_up.chunk(2, 1)
            shard = ExpertWeights(
                torch.cat((gate[:, columns], up[:, columns]), 1), whole.down[:, :, columns].contiguous()
            )
            total += fused_experts(x, shard, *routing).double()
        assert error(total, exact_experts(x, whole, *routing)) < 2 * TOLERANCE[BF16]
