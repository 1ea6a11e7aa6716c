"""Where the time of profiled steps goes: a trace of torch's profiler, summed up by what the work is for."""

import gzip
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

PARTS: Final = ("attention", "matrix work", "sampling", "rest")
IDLE: Final = "idle"
_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST: Final = ("cpu_op",)
_PATTERNS: Final = (
    ("attention", r"attention|flash|xqa|mha|paged|prefill|decode|merge_splits_kernel|\bfmha"),
    (
        "matrix work",
        r"gemm|nvjet|cublas|cutlass|xmma|split_?k|matmul|scaled_mm|gemv|aten::(mm|addmm|bmm|baddbmm)\b",
    ),
    (
        "sampling",
        r"chunk_maxima_kernel|partial_sums_kernel|gather_candidates_kernel|find_thresholds_kernel|apply_token_bitmask_kernel|count_tokens_kernel|sampl|top_?k|top_?p|sort|softmax|penal|gumbel|argmax|multinomial",
    ),
)
"""In this order: the first that fits."""


@dataclass(frozen=True, slots=True)
class Event:
    """One kernel, or one operation of a CPU; times in seconds."""

    name: str
    begin: float
    seconds: float
    lane: tuple[str, str]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Seconds by part, those without any work as ``idle``; ``largest`` are names, with seconds and counts."""

    span: float
    parts: dict[str, float]
    largest: list[tuple[str, float, int]]


def read_trace(path: Path) -> list[Event]:
    """The work of a GPU in a trace, or of a CPU in one that has none."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    entries = msgspec.json.decode(data)["traceEvents"]
    for kinds in (_DEVICE, _HOST):
        events = [_event(entry) for entry in entries if entry.get("cat") in kinds and "dur" in entry]
        if events:
            return events if kinds is _DEVICE else own_times(events)
    return []


def own_times(events: Iterable[Event]) -> list[Event]:
    """Operations less those that they call, which stand within them in the same thread."""
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
    return [Event(event.name, event.begin, max(own, 0.0), event.lane) for event, own in found]


def part_of(name: str) -> str:
    """What a kernel or operation is for, by its name."""
    lowered = name.lower()
    return next((part for part, pattern in _PATTERNS if re.search(pattern, lowered)), PARTS[-1])


def break_down(events: Sequence[Event], *, largest: int = 15) -> Breakdown:
    """Sum ``events`` up. What runs beside other work counts in full, so the parts may exceed the span."""
    parts = dict.fromkeys(PARTS, 0.0)
    names: dict[str, list[float]] = defaultdict(list)
    for event in events:
        parts[part_of(event.name)] += event.seconds
        names[event.name].append(event.seconds)
    begin = min((event.begin for event in events), default=0.0)
    end = max((event.begin + event.seconds for event in events), default=0.0)
    parts[IDLE] = end - begin - _covered(events)
    ranked = sorted(names.items(), key=lambda item: -sum(item[1]))[:largest]
    return Breakdown(end - begin, parts, [(name, sum(times), len(times)) for name, times in ranked])


def _covered(events: Iterable[Event]) -> float:
    """Length of the union of all events."""
    covered, reached = 0.0, float("-inf")
    for event in sorted(events, key=lambda each: each.begin):
        end = event.begin + event.seconds
        covered += max(0.0, end - max(event.begin, reached))
        reached = max(reached, end)
    return covered


def _event(entry: dict[str, Any]) -> Event:
    lane = (str(entry.get("pid")), str(entry.get("tid")))
    return Event(str(entry["name"]), entry["ts"] / 1e6, entry["dur"] / 1e6, lane)
