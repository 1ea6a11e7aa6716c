"""Measurement of candidates: the time of each on each workload, in CUDA graphs, and the choice of the best."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

import torch

from skiff_runtime.kernels.tuning import Tuning, overridden

KEEP_WITHIN: Final = 0.02
"""The present value is kept where no candidate is faster than it by more than this: runs differ by about 1%."""
GRAPH_SECONDS: Final = 0.005
"""The time that one replay of a graph should take at least, so that its own launch does not count."""
REPLAYS: Final = 9

Launch = Callable[[], object]
"""One unit of work, such as a kernel with all its arguments."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Work that judges a tuned number.

    ``prepare`` allocates inputs on a device, several sets in turn where one would stay in the GPU's cache, and
    returns a function that makes the launches. That function is called once for each candidate, while the candidate
    is in force.
    """

    name: str
    prepare: Callable[[torch.device], Callable[[], Sequence[Launch]]]


@dataclass(frozen=True, slots=True)
class Tunable:
    """A tuned number: the path of its field in ``Tuning``, such as ``gemv.tile``, its candidates, and its workloads.

    ``is_threshold``: the workloads are not averaged; each has the size of a candidate, and its launches are ours and
    the library's. The value is the largest size up to which ours is never slower.
    """

    path: str
    candidates: tuple[Any, ...]
    workloads: tuple[Workload, ...]
    is_threshold: bool = False


@dataclass(frozen=True, slots=True)
class Measurement:
    """The times of a tunable: ``micros`` has a line for each workload and a column for each of ``columns``.

    Columns are the candidates, or ours and the library's for a threshold. NaN is a candidate that the GPU cannot run.
    """

    tunable: Tunable
    columns: tuple[Any, ...]
    micros: tuple[tuple[float, ...], ...]
    present: Any
    chosen: Any


Timer = Callable[[Sequence[Launch]], float]
"""Returns the microseconds of one launch."""


def get_field(tuning: Tuning, path: str) -> Any:
    """Return the value at a path; a number in it is an index of a tuple."""
    value: Any = tuning
    for name in path.split("."):
        value = value[int(name)] if name.isdecimal() else getattr(value, name)
    return value


def replace_field(tuning: Any, path: str, value: Any) -> Any:
    """Return a copy of ``tuning`` with another value at a path."""
    name, _, rest = path.partition(".")
    if name.isdecimal():
        items = list(tuning)
        items[int(name)] = replace_field(items[int(name)], rest, value) if rest else value
        return tuple(items)
    return replace(tuning, **{name: replace_field(getattr(tuning, name), rest, value) if rest else value})


def measure_all(
    tunables: Iterable[Tunable], tuning: Tuning, device: torch.device, timer: Timer
) -> Iterator[Measurement]:
    """Measure one tunable after another, each with the values that were chosen before."""
    for tunable in tunables:
        measure = measure_threshold if tunable.is_threshold else measure_candidates
        measurement = measure(tunable, tuning, device, timer)
        tuning = replace_field(tuning, tunable.path, measurement.chosen)
        yield measurement


def measure_candidates(tunable: Tunable, tuning: Tuning, device: torch.device, timer: Timer) -> Measurement:
    """Time each candidate, and the present value, on each workload."""
    present = get_field(tuning, tunable.path)
    candidates = tuple(dict.fromkeys((*tunable.candidates, present)))
    micros = []
    for workload in tunable.workloads:
        make_launches = workload.prepare(device)
        times = []
        for candidate in candidates:
            with overridden(replace_field(tuning, tunable.path, candidate)):
                times.append(_time_or_nan(make_launches, timer))
        micros.append(tuple(times))
    return Measurement(tunable, candidates, tuple(micros), present, choose(candidates, micros, present))


def measure_threshold(tunable: Tunable, tuning: Tuning, device: torch.device, timer: Timer) -> Measurement:
    """Time ours and the library's at each size."""
    present = get_field(tuning, tunable.path)
    micros = []
    with overridden(tuning):
        for workload in tunable.workloads:
            ours, library = workload.prepare(device)()
            micros.append((timer([ours]), timer([library])))
    wins = [mine <= other for mine, other in micros]
    won = wins.index(False) if False in wins else len(wins)
    chosen = tunable.candidates[won - 1] if won else 0
    return Measurement(tunable, ("ours", "library"), tuple(micros), present, chosen)


def choose(candidates: Sequence[Any], micros: Sequence[Sequence[float]], present: Any) -> Any:
    """Return the candidate with the least geometric mean of times, or ``present`` if that is hardly slower."""
    means = {}
    for index, candidate in enumerate(candidates):
        times = [line[index] for line in micros]
        means[candidate] = math.exp(sum(map(math.log, times)) / len(times))
    runnable = {candidate: mean for candidate, mean in means.items() if not math.isnan(mean)}
    if not runnable:
        return present
    best = min(runnable, key=lambda candidate: runnable[candidate])
    if present in runnable and runnable[present] <= runnable[best] * (1 + KEEP_WITHIN):
        return present
    return best


def _time_or_nan(make_launches: Callable[[], Sequence[Launch]], timer: Timer) -> float:
    """Time the launches; NaN where the candidate takes more shared memory or registers than the GPU has."""
    from triton import OutOfResources

    try:
        return timer(make_launches())
    except OutOfResources:
        return math.nan


def time_on_gpu(launches: Sequence[Launch]) -> float:
    """Return the microseconds of one launch, the median of several replays of a CUDA graph that repeats all of them."""
    with _own_stream():
        for launch in launches:  # compiles
            launch()
        rounds = max(1, math.ceil(GRAPH_SECONDS / _seconds(_capture(launches))))
        graph = _capture(list(launches) * rounds)
        graph.replay()
        return median(_seconds(graph) for _ in range(REPLAYS)) / (len(launches) * rounds) * 1e6


@contextmanager
def _own_stream() -> Iterator[None]:
    """Switch to a stream of our own: the default one cannot be captured."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _capture(launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    for launch in launches:
        launch()
    graph.capture_end()
    return graph


def _seconds(graph: torch.cuda.CUDAGraph) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
