"""The tuned numbers of mixture of experts that ``skiff tune`` measures: their candidates and workloads.

Shapes are those of Qwen3-30B-A3B, and of Mixtral 8x7B for long experts. A tile is judged by whole layers of experts: the
launches beside a product may overlap with it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Literal

import torch

from skiff_runtime.kernels.fp8_tensors import E4M3
from skiff_runtime.kernels.fused_moe import (
    ROUTER_COUNTERS,
    ExpertWeights,
    add_rms_norm_route,
    fused_experts,
    fused_topk,
)
from skiff_runtime.kernels.triton.moe.moe_align_block_size import moe_align_block_size
from skiff_runtime.kernels.triton.moe.moe_sum import moe_sum
from skiff_runtime.kernels.tuning import (
    HOPPER_MOE,
    ExpertGemvTile,
    GroupedGemmRule,
    GroupedGemmTile,
)
from skiff_runtime.tune.measure import Launch, Tunable, Workload

WeightFormat = Literal["bfloat16", "FP8", "block FP8"]
DTYPE: Final = torch.bfloat16
SCALE_BLOCK: Final = 128
MAX_SHARED_BYTES: Final = 220 << 10
"""Of a candidate's pipeline: a program has 227 KiB, a little of it for other things."""
CACHE_BYTES: Final = 256 << 20
"""More than any GPU's L2 cache: experts of this size in turn find nothing of themselves there."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """Experts of a layer, and their sizes."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int


QWEN: Final = _Shape("Qwen3-30B-A3B", 128, 8, 2048, 768)
MIXTRAL: Final = _Shape("Mixtral 8x7B", 8, 2, 4096, 14_336)


def _make_experts(shape: _Shape, weight_format: WeightFormat, device: torch.device) -> ExpertWeights:
    sizes = (shape.experts, 2 * shape.inner, shape.hidden), (shape.experts, shape.hidden, shape.inner)
    if weight_format == "bfloat16":
        gate_up, down = (torch.randn(size, dtype=DTYPE, device=device) for size in sizes)
        return ExpertWeights(gate_up, down)
    gate_up, down = (torch.empty(size, dtype=E4M3, device=device) for size in sizes)
    for each in (gate_up, down):
        each.view(torch.uint8).random_(0, 0x70)  # finite numbers, none of them negative
    parts = 1 if weight_format == "FP8" else SCALE_BLOCK
    shapes = [size[:2] if parts == 1 else (size[0], size[1] // parts, size[2] // parts) for size in sizes]
    gate_up_scales, down_scales = (
        torch.full(each, 1e-3, dtype=torch.float32, device=device) for each in shapes
    )
    block_shape = None if parts == 1 else (parts, parts)
    return ExpertWeights(gate_up, down, gate_up_scales, down_scales, block_shape=block_shape)


def _route(shape: _Shape, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(tokens, shape.experts, dtype=torch.float32, device=device)
    return fused_topk(logits, shape.top_k, renormalize=True)


def _experts(shape: _Shape, tokens: int, weight_format: WeightFormat) -> Workload:
    """Layers of experts, each with its own routing."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x = torch.randn(tokens, shape.hidden, dtype=DTYPE, device=device)
        item_bytes = 2 if weight_format == "bfloat16" else 1
        chosen = min(tokens * shape.top_k, shape.experts)
        layers = max(2, -(-CACHE_BYTES // (chosen * 3 * shape.inner * shape.hidden * item_bytes)))
        work = [
            (_make_experts(shape, weight_format, device), *_route(shape, tokens, device))
            for _ in range(layers)
        ]
        return lambda: [partial(fused_experts, x, *each) for each in work]

    return Workload(f"{shape.name} in {weight_format}, {tokens} tokens", prepare)


def _routing(tokens: int) -> Workload:
    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        logits = torch.randn(tokens, QWEN.experts, dtype=torch.float32, device=device)
        return lambda: [partial(fused_topk, logits, QWEN.top_k, renormalize=True)]

    return Workload(f"{QWEN.name}, {tokens} tokens", prepare)


def _router(tokens: int) -> Workload:
    """Norms and routers of many layers."""

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        x, residual = (torch.randn(tokens, QWEN.hidden, dtype=DTYPE, device=device) for _ in range(2))
        norm_weight = torch.ones(QWEN.hidden, dtype=DTYPE, device=device)
        count = CACHE_BYTES // (2 * QWEN.experts * QWEN.hidden)
        weights = torch.randn(count, QWEN.experts, QWEN.hidden, dtype=DTYPE, device=device)
        counters = torch.zeros(count, ROUTER_COUNTERS, dtype=torch.int32, device=device)
        norm = x, residual, norm_weight, 1e-6
        return lambda: [
            partial(add_rms_norm_route, *norm, *router, QWEN.top_k, renormalize=True)
            for router in zip(weights, counters, strict=True)
        ]

    return Workload(f"{QWEN.name}, {tokens} tokens", prepare)


def _sorting(tokens: int) -> Workload:
    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        _, ids = _route(QWEN, tokens, device)
        return lambda: [partial(moe_align_block_size, ids, first_expert=0, experts=QWEN.experts, rows=16)]

    return Workload(f"{QWEN.name}, {tokens} tokens", prepare)


def _sum(tokens: int) -> Workload:
    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        _, ids = _route(QWEN, tokens, device)
        x = torch.randn(tokens * QWEN.top_k, QWEN.hidden, dtype=DTYPE, device=device)
        output = torch.empty(tokens, QWEN.hidden, dtype=DTYPE, device=device)
        return lambda: [partial(moe_sum, x, ids, output, first_expert=0, experts=QWEN.experts)]

    return Workload(f"{QWEN.name}, {tokens} tokens", prepare)


GEMV_TILES: Final = tuple(
    ExpertGemvTile(columns, warps)
    for columns, warps in (
        (256, 1),
        (256, 4),
        (256, 8),
        (512, 1),
        (512, 2),
        (1024, 1),
        (1024, 2),
        (1024, 4),
        (2048, 2),
        (2048, 4),
        (2048, 8),
    )
)
DOWN_TILES: Final = tuple(
    ExpertGemvTile(columns, warps)
    for columns, warps in ((256, 2), (256, 4), (256, 8), (512, 4), (512, 8), (1024, 8))
)
"""Experts are the lines of a tile, so that there is more to divide among warps."""
FP8_GATE_UP_TILES: Final = tuple(
    ExpertGemvTile(columns, warps, rows)
    for columns, warps, rows in (
        (256, 1, 1),
        (1024, 1, 1),
        (1024, 2, 1),
        (2048, 4, 1),
        (256, 1, 2),
        (1024, 1, 2),
        (1024, 2, 2),
        (1024, 4, 2),
        (1024, 2, 4),
        (1024, 4, 4),
    )
)
FP8_DOWN_TILES: Final = tuple(
    ExpertGemvTile(columns, warps, rows)
    for columns, warps, rows in (
        (256, 4, 1),
        (256, 2, 2),
        (256, 4, 2),
        (256, 8, 2),
        (256, 2, 4),
        (256, 4, 4),
        (256, 8, 4),
        (256, 4, 8),
        (256, 8, 8),
    )
)
FP8_LONG_DOWN_TILES: Final = tuple(
    ExpertGemvTile(columns, warps, rows)
    for columns, warps, rows in (
        (512, 2, 2),
        (1024, 2, 2),
        (1024, 4, 2),
        (2048, 2, 2),
        (2048, 4, 2),
        (1024, 4, 4),
    )
)
FEW_ROWS_TILES: Final = (
    (64, 128, 4, 4, False),
    (64, 256, 4, 3, False),
    (128, 128, 4, 3, False),
    (128, 128, 4, 3, True),
    (128, 256, 4, 2, True),
    (256, 128, 8, 2, False),
    (256, 128, 8, 2, True),
)
"""Rows of weights, inputs, warps, stages and swap for row blocks of 16 or 32."""
MANY_ROWS_TILES: Final = (
    (128, 64, 4, 3, False),
    (128, 128, 4, 3, False),
    (128, 128, 8, 3, False),
    (256, 64, 8, 3, False),
    (256, 64, 8, 4, False),
    (256, 128, 8, 2, False),
    (256, 128, 8, 3, False),
)
"""The same for row blocks of 64 or 128."""


def _grouped_tiles(
    rule: GroupedGemmRule, present: GroupedGemmTile, weights: int, weight_format: WeightFormat
) -> tuple[GroupedGemmTile, ...]:
    """Return the candidates for one product of a rule, the present one first; ``weights`` is 2 for gate and up."""
    found = [present]
    for weight_rows, inputs, warps, stages, swap in FEW_ROWS_TILES if rule.rows <= 32 else MANY_ROWS_TILES:
        tile = GroupedGemmTile(weight_rows // weights, inputs, present.group, warps, stages, swap)
        item_bytes = 2 if weight_format == "bfloat16" else 1
        shared = (rule.rows + weight_rows) * inputs * item_bytes * stages
        is_one_block = inputs == SCALE_BLOCK and tile.outputs <= SCALE_BLOCK
        if shared <= MAX_SHARED_BYTES and (is_one_block or weight_format != "block FP8"):
            found.append(tile)
    return tuple(dict.fromkeys(found))


def _grouped(path: str, rules: tuple[GroupedGemmRule, ...], weight_format: WeightFormat) -> Iterator[Tunable]:
    """Yield the tiles of all rules; each is judged by the most tokens that it is for, the last by 2,048."""
    for index, rule in enumerate(rules):
        tokens = 2048 if rule.max_rows is None else int(rule.max_rows * QWEN.experts) // QWEN.top_k
        workloads = (_experts(QWEN, tokens, weight_format),)
        for name, present, weights in (("gate_up", rule.gate_up, 2), ("down", rule.down, 1)):
            candidates = _grouped_tiles(rule, present, weights, weight_format)
            yield Tunable(f"{path}.{index}.{name}", candidates, workloads)


def _gemv(
    path: str,
    weight_format: WeightFormat,
    gate_up: tuple[ExpertGemvTile, ...] = GEMV_TILES,
    down: tuple[ExpertGemvTile, ...] = DOWN_TILES,
    long_down: tuple[ExpertGemvTile, ...] = GEMV_TILES,
) -> Iterator[Tunable]:
    few = tuple(_experts(QWEN, tokens, weight_format) for tokens in (1, 4))
    yield Tunable(f"{path}.gate_up", gate_up, few)
    yield Tunable(f"{path}.down", down, few)
    yield Tunable(f"{path}.long_down", long_down, (_experts(MIXTRAL, 1, weight_format),))
    yield Tunable(f"{path}.preload_down", (False, True), few)


MOE_TUNABLES: Final = (
    Tunable("moe.routing_warps", (1, 2, 4, 8), (_routing(1), _routing(256), _routing(8192))),
    Tunable("moe.router_topk_rows", (1, 2, 4), (_router(1), _router(4))),
    Tunable("moe.fuse_router_norm", (False, True), (_router(1), _router(4))),
    Tunable("moe.max_router_topk_tokens", (0, 1, 2, 4, 8), tuple(_router(tokens) for tokens in (1, 2, 4, 8))),
    Tunable("moe.max_chunk", (1024, 2048, 4096, 8192), (_sorting(64), _sorting(512), _sorting(8192))),
    *_gemv("moe.gemv", "bfloat16"),
    *_gemv("moe.fp8_gemv", "FP8", FP8_GATE_UP_TILES, FP8_DOWN_TILES, FP8_LONG_DOWN_TILES),
    *(
        Tunable(f"moe.{name}", (0, 1, 2, 4), tuple(_experts(QWEN, tokens, "FP8") for tokens in (1, 2, 4)))
        for name in ("quantizing_gate_up_tokens", "quantizing_down_tokens")
    ),
    *_grouped("moe.rules", HOPPER_MOE.rules, "bfloat16"),
    *_grouped("moe.fp8_rules", HOPPER_MOE.fp8_rules, "FP8"),
    *_grouped("moe.block_fp8_rules", HOPPER_MOE.block_fp8_rules, "block FP8"),
    Tunable(
        "moe.experts_per_pair",
        (1, 2, 4, 8),
        tuple(_experts(QWEN, tokens, "bfloat16") for tokens in (2, 4, 6, 8, 12, 16)),
    ),
    Tunable("moe.sum_block", (512, 1024, 2048), (_sum(8), _sum(256), _sum(8192))),
    Tunable("moe.sum_warps", (2, 4, 8), (_sum(8), _sum(256), _sum(8192))),
)
