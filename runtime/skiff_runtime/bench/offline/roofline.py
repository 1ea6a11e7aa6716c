"""The least time that a workload can take on a GPU: bytes at the rate of copies, arithmetic at that of matrices.

Pure arithmetic on the model's configuration. Requests take their places as soon as one is free; a prompt costs its
arithmetic; a decode step costs the larger of reading the weights once and its arithmetic, and then the reading of K
and V of every token before it, those of a prefix that several rows of the batch share only once.
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
    estimate_weight_bytes,
    kv_bytes_per_token,
)

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Rates:
    """What a device can do in a second."""

    copied_bytes: float
    matrix_operations: float


@dataclass(frozen=True, slots=True)
class Load:
    """One request: tokens of its prompt, of its output, and how many of the former it shares within its ``group``."""

    prompt: int
    output: int
    shared: int = 0
    group: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """What one rank does for a token, in bytes and floating-point operations. An attended token is one of the context."""

    step_bytes: float
    token_operations: float
    head_operations: float
    kv_bytes: float
    attended_operations: float
    prompt_share: float
    """Of a token's operations, what a prompt's tokens need that are not its last: nothing asks for their last layer."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Seconds; a step for each time that some request decodes."""

    prefill_seconds: float
    decode_seconds: float
    decode_steps: int

    @property
    def seconds(self) -> float:
        """Of all work."""
        return self.prefill_seconds + self.decode_seconds


def work_of(config: Config, model: ModelConfig) -> Work:
    """One of ``config.tp_size`` ranks' share. ``config`` is resolved."""
    ranks, element_bytes = config.tp_size, DTYPE_BYTES[config.dtype]
    quantization: Quantization = "fp8" if config.quantization == "fp8" else "none"
    share = count_parameters(model, ranks)
    weights = estimate_weight_bytes(model, ranks, element_bytes=element_bytes, quantization=quantization)
    looked_up = 0 if model.tie_word_embeddings else share.embedding * element_bytes
    head = share.embedding if model.tie_word_embeddings else share.head
    cached_bytes = 1 if config.kv_cache_dtype == "fp8_e4m3" else element_bytes
    return Work(
        step_bytes=weights - looked_up,
        token_operations=2.0 * (share.attention + share.mlp),
        head_operations=2.0 * head,
        kv_bytes=kv_bytes_per_token(model, ranks, cached_bytes),
        attended_operations=4.0 * model.num_layers * model.num_heads * model.head_dim / ranks,
        prompt_share=1 - 1 / model.num_layers,
    )


def floor(work: Work, loads: Sequence[Load], *, running: int, rates: Rates) -> Floor:
    """The least time of all ``loads``, given at once, when at most ``running`` of them run at a time."""
    rows, attended = _decode_steps(loads, running)
    weights = work.step_bytes / rates.copied_bytes
    arithmetic = rows * (work.token_operations + work.head_operations) / rates.matrix_operations
    reading = attended * work.kv_bytes / rates.copied_bytes
    return Floor(
        prefill_seconds=_prefill_operations(work, loads) / rates.matrix_operations,
        decode_seconds=float((np.maximum(weights, arithmetic) + reading)[rows > 0].sum()),
        decode_steps=int((rows > 0).sum()),
    )


def _prefill_operations(work: Work, loads: Sequence[Load]) -> float:
    """Each distinct token once, attending to all before it; last layer and head for the last one of each prompt."""
    operations, seen = 0.0, set()
    for load in loads:
        first = load.shared if load.group in seen else 0
        seen.add(load.group)
        attended = (load.prompt * (load.prompt + 1) - first * (first + 1)) / 2
        operations += (load.prompt - first) * work.token_operations + attended * work.attended_operations
    last = (1 - work.prompt_share) * work.token_operations + work.head_operations
    return work.prompt_share * operations + len(loads) * last


def _decode_steps(loads: Sequence[Load], running: int) -> tuple[Floats, Floats]:
    """For each step, how many requests decode, and how many tokens of context are read.

    The first token of a request comes of its prompt, without a decode step.
    """
    places = [0] * running
    spans = []
    for load in loads:
        begin = heapq.heappop(places)
        spans.append((begin, begin + load.output - 1))
        heapq.heappush(places, begin + load.output - 1)
    steps = max(end for _, end in spans)
    rows, attended = np.zeros(steps), np.zeros(steps)
    groups: dict[int, tuple[int, NDArray[np.bool_]]] = {}
    for load, (begin, end) in zip(loads, spans, strict=True):
        rows[begin:end] += 1
        attended[begin:end] += load.prompt - load.shared + 1 + np.arange(end - begin)
        if load.shared:
            _, active = groups.setdefault(load.group, (load.shared, np.zeros(steps, np.bool_)))
            active[begin:end] = True
    for shared, active in groups.values():
        attended += shared * active
    return rows, attended
