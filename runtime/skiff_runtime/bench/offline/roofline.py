"""Roofline of a workload: the least time that its memory traffic and arithmetic take at a device's peak rates.

Pure arithmetic on the model's configuration. A request starts as soon as one of the running ones ends. A prompt costs
its arithmetic. A decode step costs the larger of reading the weights once and its arithmetic, plus reading K and V of
all tokens of context; a prefix that several rows of the batch share is read only once. Of the E experts of a layer, of
which a token takes k, a step of T tokens reads as many as T tokens that choose at random are expected to touch:
E * (1 - (1 - k / E) ** T).
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.config import Config, Quantization
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.models.footprint import (
    DTYPE_BYTES,
    count_parameters,
    estimate_expert_bytes,
    estimate_weight_bytes,
    kv_bytes_per_token,
)

Floats = NDArray[np.float64]


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
        kv_bytes: bytes of K and V per token of context.
        attended_flops: FLOPs of attention per token of context.
        prompt_share: fraction of a token's FLOPs that all tokens of a prompt but the last one need: their hidden
            states after the last layer are never used.
    """

    step_bytes: float
    expert_bytes: float
    expert_share: float
    token_flops: float
    head_flops: float
    kv_bytes: float
    attended_flops: float
    prompt_share: float


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
    quantization: Quantization = "fp8" if config.quantization == "fp8" else "none"
    share = count_parameters(model, ranks)
    weights, experts = (
        estimate(
            model,
            ranks,
            element_bytes=element_bytes,
            quantization=quantization,
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
        prompt_share=1 - 1 / model.num_layers,
    )


def estimate_roofline(
    cost: ModelCost, requests: Sequence[RequestShape], *, max_running: int, peaks: DevicePeaks
) -> RooflineTime:
    """Estimate the least time of ``requests`` that arrive at once and run at most ``max_running`` at a time."""
    rows, attended = _simulate_decode(requests, max_running)
    touched = cost.expert_bytes * (1 - (1 - cost.expert_share) ** rows)
    weights = (cost.step_bytes + touched) / peaks.bytes_per_second
    arithmetic = rows * (cost.token_flops + cost.head_flops) / peaks.flops_per_second
    kv_reads = attended * cost.kv_bytes / peaks.bytes_per_second
    return RooflineTime(
        prefill_seconds=_count_prefill_flops(cost, requests) / peaks.flops_per_second,
        decode_seconds=float((np.maximum(weights, arithmetic) + kv_reads)[rows > 0].sum()),
        decode_steps=int((rows > 0).sum()),
    )


def _count_prefill_flops(cost: ModelCost, requests: Sequence[RequestShape]) -> float:
    """Count each distinct token once, with attention to all before it; last layer and head for last tokens only."""
    flops, seen = 0.0, set()
    for request in requests:
        first = request.shared if request.group in seen else 0
        seen.add(request.group)
        attended = (request.prompt * (request.prompt + 1) - first * (first + 1)) / 2
        flops += (request.prompt - first) * cost.token_flops + attended * cost.attended_flops
    last = (1 - cost.prompt_share) * cost.token_flops + cost.head_flops
    return cost.prompt_share * flops + len(requests) * last


def _simulate_decode(requests: Sequence[RequestShape], max_running: int) -> tuple[Floats, Floats]:
    """Return, for each decode step, the number of decoding requests and of tokens of context that are read.

    The first token of a request comes from its prompt, without a decode step.
    """
    free_at = [0] * max_running  # a heap of the steps at which each slot becomes free
    spans = []
    for request in requests:
        begin = heapq.heappop(free_at)
        spans.append((begin, begin + request.output - 1))
        heapq.heappush(free_at, begin + request.output - 1)
    steps = max(end for _, end in spans)
    rows, attended = np.zeros(steps), np.zeros(steps)
    groups: dict[int, tuple[int, NDArray[np.bool_]]] = {}
    for request, (begin, end) in zip(requests, spans, strict=True):
        rows[begin:end] += 1
        attended[begin:end] += request.prompt - request.shared + 1 + np.arange(end - begin)
        if request.shared:
            _, active = groups.setdefault(request.group, (request.shared, np.zeros(steps, np.bool_)))
            active[begin:end] = True
    for shared, active in groups.values():
        attended += shared * active
    return rows, attended
