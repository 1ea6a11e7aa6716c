"""The memory profile on a simulated GPU: the graphs' memory from the first two of them, and the use of a kept profile."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any, cast

import pytest

from skiff_runtime.config import Config
from skiff_runtime.engine import memory_profile as profile
from skiff_runtime.engine.graph_captures import CaptureTask
from skiff_runtime.engine.graph_memory import GraphMemory, MemoryProfile
from skiff_runtime.engine.memory_profile_cache import MemoryProfileCache

GIB = 1 << 30
MIB = 1 << 20


class Gpu:
    """80 GiB of memory, of which each capture takes a little while other processes allocate and free."""

    def __init__(self, allocator: list[int], driver: list[int], others: list[int]) -> None:
        self.free, self.reserved = 80 * GIB, 5 * GIB
        self._costs = zip(allocator, driver, others, strict=True)

    def capture_tasks(self) -> list[CaptureTask]:
        return [CaptureTask(size, self.capture) for size in range(10, 0, -1)]

    def capture(self) -> None:
        allocator, driver, others = next(self._costs)
        self.reserved += allocator
        self.free -= allocator + driver + others


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([0, 0], 650 + 9 * 30),
        ([0, 40 * GIB], 650 + 9 * (10 + 64)),
        ([40 * GIB, 0], 600 + 64 + 9 * 30),
        ([-40 * GIB, -40 * GIB], 600 + 9 * 10),
    ],
    ids=["alone", "other starts during second", "other starts during first", "others end"],
)
def test_memory_of_other_processes_is_bounded(
    others: list[int], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu([600 * MIB, 10 * MIB], [50 * MIB, 20 * MIB], others)
    monkeypatch.setattr(profile, "_read_memory", lambda: (gpu.free, gpu.reserved))
    measured = profile._measure_graphs(lambda: cast(Any, gpu), Config(model="m"), 64 * MIB)
    assert measured.total == expected * MIB


KEPT = MemoryProfile(
    4 * GIB, GraphMemory(0, 600 * MIB, 30 * MIB, 20), GraphMemory(0, 300 * MIB, 20 * MIB, 25), GIB
)


class Start:
    """One start of a rank, whose largest step takes ``activations`` bytes and whose graphs take what is ``true``."""

    def __init__(
        self, cache: MemoryProfileCache | None, activations: int, true: MemoryProfile = KEPT
    ) -> None:
        self.cache, self.activations, self.true = cache, activations, true
        self.order: list[str] = []

    def measure_activations(self) -> int:
        self.order.append("step")
        return self.activations

    def measure_graphs(self) -> tuple[GraphMemory, GraphMemory]:
        self.order.append("graphs")
        return self.true.decode_graphs, self.true.prefill_graphs

    def run(self, all_ranks: Any = bool, sampling: int = GIB) -> MemoryProfile:
        return profile.find_or_measure(
            self.cache,
            all_ranks,
            measure_activations=self.measure_activations,
            measure_graphs=self.measure_graphs,
            sampling=sampling,
        )


def make_cache(folder: Path, key: str = "key") -> MemoryProfileCache:
    return MemoryProfileCache(folder, key, max_bytes=80 * GIB)


def test_first_start_measures_everything_and_the_second_one_a_step_alone(tmp_path: Path) -> None:
    first, second = (Start(make_cache(tmp_path), 4 * GIB) for _ in range(2))
    assert first.run() == KEPT
    assert second.run() == KEPT
    assert (first.order, second.order) == (["step", "graphs"], ["step"])
    assert KEPT.reserved_bytes == int(4.4 * GIB) + GIB + (600 + 19 * 30 + 300 + 24 * 20) * MIB


@pytest.mark.parametrize("activations", [3 * GIB, 4 * GIB - 100 * MIB, 4 * GIB + 100 * MIB, 9 * GIB])
def test_kept_profile_of_another_step_is_replaced(tmp_path: Path, activations: int) -> None:
    make_cache(tmp_path).store(KEPT)
    true = MemoryProfile(activations, GraphMemory(0, 900 * MIB, 50 * MIB, 20), KEPT.prefill_graphs, GIB)
    start = Start(make_cache(tmp_path), activations, true)
    assert start.run() == true
    assert start.order == ["step", "graphs"]
    assert make_cache(tmp_path).load() == true


def test_small_deviation_is_accepted_and_the_larger_step_reserved(tmp_path: Path) -> None:
    """The activations are always those of this start, so what a step needs is never taken from the disk."""
    make_cache(tmp_path).store(KEPT)
    start = Start(make_cache(tmp_path), 4 * GIB + 50 * MIB)
    assert start.run() == MemoryProfile(
        4 * GIB + 50 * MIB, KEPT.decode_graphs, KEPT.prefill_graphs, KEPT.sampling
    )
    assert start.order == ["step"]


def test_kept_profile_with_other_sampling_is_replaced(tmp_path: Path) -> None:
    make_cache(tmp_path).store(KEPT)
    start = Start(make_cache(tmp_path), 4 * GIB)
    assert start.run(sampling=2 * GIB).sampling == 2 * GIB
    assert start.order == ["step", "graphs"]


def test_without_a_cache_everything_is_measured() -> None:
    start = Start(None, 4 * GIB)
    assert start.run() == KEPT
    assert start.order == ["step", "graphs"]


@pytest.mark.parametrize("lacking", ["entry", "fit"])
def test_ranks_measure_together_if_one_of_them_must(tmp_path: Path, lacking: str) -> None:
    """A rank that took the kept profile alone would leave the others waiting in a collective of the captures."""
    barrier, votes = Barrier(2, timeout=30), [True, True]
    caches = [make_cache(tmp_path, f"rank {rank}") for rank in range(2)]
    for cache in caches[: 1 if lacking == "entry" else 2]:
        cache.store(KEPT)
    starts = [Start(caches[0], 4 * GIB), Start(caches[1], (5 if lacking == "fit" else 4) * GIB)]

    def run(rank: int) -> MemoryProfile:
        def all_ranks(ok: bool) -> bool:
            votes[rank] = ok
            barrier.wait()
            return all(votes)

        return starts[rank].run(all_ranks)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert [start.order for start in starts] == [["step", "graphs"]] * 2
    assert votes == [True, False]
    assert all(cache.load() is not None for cache in caches)
