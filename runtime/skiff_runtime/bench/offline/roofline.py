"""Roofline of a workload: the least time that its memory traffic and arithmetic take at a device's peak rates.

Pure arithmetic on the model's configuration. A request starts as soon as one of the running ones ends. A prompt costs
its arithmetic. A decode step costs the larger of reading the weights once and its arithmetic, plus reading K and V of
all tokens of context; a prefix that several rows of the batch share is read only once. A layer with a sliding window
computes and reads no more than that of any context. Of the E experts of a layer, of which a token takes k, a step of T
tokens reads as many as T tokens that choose at random are expected to touch: E * (1 - (1 - k / E) ** T).
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.config import Config
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.footprint import (
    DTYPE_BYTES,
    count_parameters,
    estimate_expert_bytes,
    estimate_weight_bytes,
    kv_bytes_per_token,
)
from skiff_runtime.models.sliding_window import SlidingWindows

Floats = NDArray[np.float64]
Spans = list[tuple[int, int]]
"""Each request's first decode step, and the one after its last."""


@dataclass(frozen=True, slots=True)
class DevicePeaks:
    """Peak rates of a device: bytes per second of a copy, and FLOPs per second of a matrix product."""

    bytes_per_second: float
    flops_per_second: float


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Lengths of a request in tokens: prompt, output, and the prefix that the requests of its ``group`` share."""

    prompt: int
    output: int
    shared: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Memory traffic and arithmetic of one rank; with expert parallelism, of a rank with an average share of the tokens.

    Attributes:
        step_bytes: weights that each decode step reads, those of experts aside.
        expert_bytes: weights of all experts.
        expert_share: fraction of its experts that a token takes, k / E.
        token_flops: FLOPs per token in attention's projections and in the MLP, or router and experts, of all layers.
        head_flops: FLOPs per token in the LM head.
        kv_bytes: bytes of K and V per token of context, in all layers.
        attended_flops: FLOPs of attention per token of context, in all layers.
        windows: the sliding window of each layer in tokens, None for full attention. Only the last token of a prompt
            needs the last layer: the hidden states of the others after it are never used.
    """

    step_bytes: float
    expert_bytes: float
    expert_share: float
    token_flops: float
    head_flops: float
    kv_bytes: float
    attended_flops: float
    windows: SlidingWindows


@dataclass(frozen=True, slots=True)
class RooflineTime:
    """Least time of a workload in seconds. ``decode_steps`` counts the steps in which any request decodes."""

    prefill_seconds: float
    decode_seconds: float
    decode_steps: int

    @property
    def seconds(self) -> float:
        """Least time of the whole workload."""
        return self.prefill_seconds + self.decode_seconds


def compute_model_cost(config: Config, model: ModelConfig) -> ModelCost:
    """Compute the cost on one of ``config.tp_size`` ranks. ``config`` is resolved."""
    ranks, element_bytes = config.tp_size, DTYPE_BYTES[config.dtype]
    share = count_parameters(model, ranks)
    weights, experts = (
        estimate(
            model,
            ranks,
            element_bytes=element_bytes,
            quantization=config.quantization,
            expert_parallel=config.expert_parallel,
        )
        for estimate in (estimate_weight_bytes, estimate_expert_bytes)
    )
    expert_share = 0.0 if model.moe is None else model.moe.top_k / model.moe.num_experts
    # A step looks up a few rows of an untied embedding, whereas a tied one is read whole as the LM head.
    looked_up = 0 if model.tie_word_embeddings else share.embedding * element_bytes
    head = share.embedding if model.tie_word_embeddings else share.head
    cached_bytes = 1 if config.kv_cache_dtype == "fp8_e4m3" else element_bytes
    return ModelCost(
        step_bytes=weights - experts - looked_up,
        expert_bytes=experts,
        expert_share=expert_share,
        token_flops=2.0 * (share.attention + share.mlp + share.routers + expert_share * share.experts),
        head_flops=2.0 * head,
        kv_bytes=kv_bytes_per_token(model, ranks, cached_bytes),
        attended_flops=4.0 * model.num_layers * model.num_heads * model.head_dim / ranks,
        windows=model.sliding_windows,
    )


def estimate_roofline(
    cost: ModelCost, requests: Sequence[RequestShape], *, max_running: int, peaks: DevicePeaks
) -> RooflineTime:
    """Estimate the least time of ``requests`` that arrive at once and run at most ``max_running`` at a time."""
    spans = _simulate_decode(requests, max_running)
    rows = _count_rows(spans)
    layers = len(cost.windows)
    touched = cost.expert_bytes * (1 - (1 - cost.expert_share) ** rows)
    weights = (cost.step_bytes + touched) / peaks.bytes_per_second
    arithmetic = rows * (cost.token_flops + cost.head_flops) / peaks.flops_per_second
    kv_reads = np.zeros(len(rows))
    for window, count in Counter(cost.windows).items():
        read = _count_read_tokens(requests, spans, window)
        kv_reads += read * (count / layers * cost.kv_bytes / peaks.bytes_per_second)
    return RooflineTime(
        prefill_seconds=_count_prefill_flops(cost, requests) / peaks.flops_per_second,
        decode_seconds=float((np.maximum(weights, arithmetic) + kv_reads)[rows > 0].sum()),
        decode_steps=int((rows > 0).sum()),
    )


def _count_prefill_flops(cost: ModelCost, requests: Sequence[RequestShape]) -> float:
    """Count each distinct token once, with attention to all before it; last layer and head for last tokens only."""
    layers, seen = len(cost.windows), set()
    before_last = Counter(cost.windows[:-1])
    flops = 0.0
    for request in requests:
        first = request.shared if request.group in seen else 0
        seen.add(request.group)
        attended = sum(
            count * (_count_pairs(request.prompt, window) - _count_pairs(first, window))
            for window, count in before_last.items()
        )
        flops += (request.prompt - first) * cost.token_flops * (layers - 1) / layers
        flops += attended * cost.attended_flops / layers
    return flops + len(requests) * (cost.token_flops / layers + cost.head_flops)


def _count_pairs(tokens: int, window: int | None) -> float:
    """Count the pairs of a token and one that it attends to, itself included, of a sequence."""
    full = tokens if window is None else min(tokens, window)
    return full * (full + 1) / 2 + (tokens - full) * full


def _simulate_decode(requests: Sequence[RequestShape], max_running: int) -> Spans:
    """Return the decode steps of each request.

    The first token of a request comes from its prompt, without a decode step.
    """
    free_at = [0] * max_running  # a heap of the steps at which each slot becomes free
    spans = []
    for request in requests:
        begin = heapq.heappop(free_at)
        spans.append((begin, begin + request.output - 1))
        heapq.heappush(free_at, begin + request.output - 1)
    return spans


def _count_rows(spans: Spans) -> Floats:
    """Return the number of decoding requests of each decode step."""
    rows = np.zeros(max(end for _, end in spans))
    for begin, end in spans:
        rows[begin:end] += 1
    return rows


def _count_read_tokens(requests: Sequence[RequestShape], spans: Spans, window: int | None) -> Floats:
    """Return the tokens of context that each decode step reads in a layer with this window.

    Of a prefix that a group shares, those tokens are read once that lie in any row's window.
    """
    steps = max(end for _, end in spans)
    read = np.zeros(steps)
    prefixes: dict[int, Floats] = {}
    for request, (begin, end) in zip(requests, spans, strict=True):
        context = request.prompt + 1 + np.arange(end - begin)
        first = np.zeros(end - begin) if window is None else np.maximum(context - window, 0)
        read[begin:end] += context - np.maximum(first, request.shared)
        if request.shared:
            prefix = prefixes.setdefault(request.group, np.zeros(steps))
            np.maximum(prefix[begin:end], request.shared - first, out=prefix[begin:end])
    for prefix in prefixes.values():
        read += prefix
    return read
