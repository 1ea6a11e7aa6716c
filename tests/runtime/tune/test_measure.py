"""The measurement of tuned numbers, with times that the tests make up."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

from skiff_runtime.kernels.tuning import DEFAULT, StreamKTile, tuning_for
from skiff_runtime.tune.measure import (
    Launch,
    Tunable,
    Workload,
    choose,
    get_field,
    measure_all,
    replace_field,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "path, value",
    [
        ("sampling_block", 64),
        ("gemv.max_outputs", 7),
        ("stream_k.rules.2.tile", StreamKTile(128, stages=2)),
        ("stream_k.rules.2.tile.stages", 9),
    ],
)
def test_replaced_field_is_read_back_and_nothing_else_changes(path: str, value: Any) -> None:
    replaced = replace_field(DEFAULT, path, value)
    assert get_field(replaced, path) == value != get_field(DEFAULT, path)
    assert replace_field(replaced, path, get_field(DEFAULT, path)) == DEFAULT


@pytest.mark.parametrize(
    "micros, present, expected",
    [
        ([[10.0, 9.0, 12.0]], "a", "b"),
        ([[10.0, 9.9, 12.0]], "a", "a"),
        ([[10.0, 1.0, 5.0], [1.0, 8.0, 1.1]], "b", "c"),
        ([[10.0, math.nan, 12.0]], "c", "a"),
        ([[math.nan, 9.0, 12.0]], "a", "b"),
        ([[math.nan] * 3], "b", "b"),
    ],
    ids=[
        "faster",
        "hardly faster",
        "mean of workloads",
        "not runnable",
        "present not runnable",
        "none runnable",
    ],
)
def test_choice_is_the_fastest_that_runs_unless_the_present_value_is_as_fast(
    micros: list[list[float]], present: str, expected: str
) -> None:
    assert choose("abc", micros, present) == expected


def make_workload(name: str, launches: Sequence[Launch]) -> Workload:
    return Workload(name, lambda device: lambda: launches)


def test_candidates_are_in_force_while_they_are_timed_and_choices_from_then_on() -> None:
    seen: list[tuple[int, int]] = []
    before = tuning_for(CPU)

    def prepare(device: torch.device) -> Callable[[], Sequence[Launch]]:
        return lambda: [lambda: None]

    def timer(launches: Sequence[Launch]) -> float:
        tuning = tuning_for(CPU)
        seen.append((tuning.sampling_block, tuning.sampling_warps))
        return 1000 / tuning.sampling_block + tuning.sampling_warps

    work = (Workload("any", prepare),)
    tunables = Tunable("sampling_block", (64, 128), work), Tunable("sampling_warps", (1, 2), work)
    found = list(measure_all(tunables, replace_field(DEFAULT, "sampling_block", 64), CPU, timer))
    present = DEFAULT.sampling_warps
    assert seen == [(64, present), (128, present), (128, 1), (128, 2), (128, present)]
    assert [measurement.chosen for measurement in found] == [128, 1]
    assert found[1].columns == (1, 2, present), "the present value is timed, too"
    assert tuning_for(CPU) is before


@pytest.mark.parametrize(
    "library, expected", [([9, 9, 9], 30), ([9, 9, 2], 20), ([9, 2, 9], 10), ([2, 9, 9], 0)], ids=str
)
def test_threshold_is_the_largest_size_up_to_which_ours_is_never_slower(
    library: list[float], expected: int
) -> None:
    times: dict[int, float] = {}
    workloads = []
    for index, micros in enumerate(library):
        ours, theirs = (lambda: None), (lambda: None)
        times[id(ours)], times[id(theirs)] = 3.0, micros
        workloads.append(make_workload(str(index), [ours, theirs]))
    tunable = Tunable("gemv.max_outputs", (10, 20, 30), tuple(workloads), is_threshold=True)
    (found,) = measure_all([tunable], DEFAULT, CPU, lambda launches: times[id(launches[0])])
    assert found.chosen == expected and found.columns == ("ours", "library")
