"""The estimate of the graphs' memory from the first two of them, on a simulated GPU."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from skiff_runtime.config import Config
from skiff_runtime.engine import memory_profile as profile

GIB = 1 << 30
MIB = 1 << 20


class Gpu:
    """80 GiB of memory, of which each capture takes a little while other processes allocate and free."""

    def __init__(self, allocator: list[int], driver: list[int], others: list[int]) -> None:
        self.free, self.reserved = 80 * GIB, 5 * GIB
        self._costs = zip(allocator, driver, others, strict=True)

    def capture_tasks(self) -> list[Callable[[], None]]:
        return [self.capture] * 10

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
    assert profile._measure_graphs(lambda: cast(Any, gpu), Config(model="m"), 64 * MIB) == expected * MIB
