"""Breakdown of profiled steps: the time in a trace of torch's profiler, by kind of kernel."""

import gzip
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

KINDS: Final = ("experts", "attention", "matmul", "sampling", "other")
IDLE: Final = "idle"
_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST: Final = ("cpu_op",)
_PATTERNS: Final = (
    (
        "experts",
        r"fused_topk_kernel|router_topk_kernel|count_experts_kernel|moe_\w+_kernel|(gate_up|down)_(gemv_)?kernel",
    ),
    ("attention", r"attention|flash|xqa|mha|paged|prefill|decode|merge_splits_kernel|\bfmha"),
    (
        "matmul",
        r"gemm|nvjet|cublas|cutlass|xmma|split_?k|matmul|scaled_mm|gemv|aten::(mm|addmm|bmm|baddbmm)\b",
    ),
    (
        "sampling",
        r"chunk_maxima_kernel|partial_sums_kernel|gather_candidates_kernel|find_thresholds_kernel|apply_token_bitmask_kernel|count_tokens_kernel|sampl|top_?k|top_?p|sort|softmax|penal|gumbel|argmax|multinomial",
    ),
)
"""Kinds by the names of kernels and operations. The first pattern that matches decides."""


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A kernel on a GPU, or an operation on a CPU, with times in seconds. ``lane``: process and thread, or stream."""

    name: str
    begin: float
    seconds: float
    lane: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds by kind; ``idle`` is the time without any event. ``largest``: names with total seconds and counts."""

    span: float
    kinds: dict[str, float]
    largest: list[tuple[str, float, int]]


def read_trace(path: Path) -> list[TraceEvent]:
    """Return the kernels in a trace, or the operations of the CPU, with their self times, if there are no kernels."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    entries = msgspec.json.decode(data)["traceEvents"]
    for kinds in (_DEVICE, _HOST):
        events = [_parse_event(entry) for entry in entries if entry.get("cat") in kinds and "dur" in entry]
        if events:
            return events if kinds is _DEVICE else compute_self_times(events)
    return []


def compute_self_times(events: Iterable[TraceEvent]) -> list[TraceEvent]:
    """Return operations with their self times: without the operations that they call, which lie within them."""
    found = []
    for lane in sorted({event.lane for event in events}):
        open_calls: list[list[Any]] = []
        in_lane = [event for event in events if event.lane == lane]
        for event in sorted(in_lane, key=lambda each: (each.begin, -each.seconds)):
            while open_calls and open_calls[-1][0].begin + open_calls[-1][0].seconds <= event.begin:
                found.append(open_calls.pop())
            if open_calls:
                open_calls[-1][1] -= event.seconds
            open_calls.append([event, event.seconds])
        found += open_calls
    return [TraceEvent(event.name, event.begin, max(own, 0.0), event.lane) for event, own in found]


def classify_kernel(name: str) -> str:
    """Return the kind of a kernel or operation by its name."""
    lowered = name.lower()
    return next((kind for kind, pattern in _PATTERNS if re.search(pattern, lowered)), KINDS[-1])


def break_down(events: Sequence[TraceEvent], *, largest: int = 15) -> Breakdown:
    """Sum up events by kind. Overlapping events count in full, so the kinds may add up to more than the span."""
    kinds = dict.fromkeys(KINDS, 0.0)
    names: dict[str, list[float]] = defaultdict(list)
    for event in events:
        kinds[classify_kernel(event.name)] += event.seconds
        names[event.name].append(event.seconds)
    begin = min((event.begin for event in events), default=0.0)
    end = max((event.begin + event.seconds for event in events), default=0.0)
    kinds[IDLE] = end - begin - _covered(events)
    ranked = sorted(names.items(), key=lambda item: -sum(item[1]))[:largest]
    return Breakdown(end - begin, kinds, [(name, sum(times), len(times)) for name, times in ranked])


def _covered(events: Iterable[TraceEvent]) -> float:
    """Return the length of the union of all events."""
    covered, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda each: each.begin):
        end = event.begin + event.seconds
        covered += max(0.0, end - max(event.begin, reached))
        reached = max(reached, end)
    return covered


def _parse_event(entry: dict[str, Any]) -> TraceEvent:
    lane = (str(entry.get("pid")), str(entry.get("tid")))
    return TraceEvent(str(entry["name"]), entry["ts"] / 1e6, entry["dur"] / 1e6, lane)
