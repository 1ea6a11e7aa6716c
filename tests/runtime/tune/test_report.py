"""The report of ``skiff tune``: tables that a reader compares, and an entry that Python reads back."""

import math
from typing import Any

import pytest

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

from skiff_runtime.kernels import tuning
from skiff_runtime.kernels.tuning import DEFAULT, AttentionTile, GemvTile, StreamKTile
from skiff_runtime.tune.measure import Measurement, Tunable, Workload, replace_field
from skiff_runtime.tune.report import describe, format_entry, format_measurement


def make_measurement(path: str, columns: tuple[Any, ...], micros: tuple[float, ...]) -> Measurement:
    tunable = Tunable(path, columns, (Workload("256 rows", lambda device: list),))
    return Measurement(tunable, columns, (micros,), present=columns[0], chosen=columns[1])


@pytest.mark.parametrize(
    "value, expected",
    [
        (700, "700"),
        (AttentionTile(64, warps=4, stages=2), "64 tokens, 4 warps, 2 stages"),
        (GemvTile(1024, pair=True), "1024 columns, pair, 4 warps"),
        (GemvTile(1024), "1024 columns, 4 warps"),
        (StreamKTile(512, stages=4), "512 inputs, 4 stages, 4 warps"),
    ],
    ids=str,
)
def test_candidates_are_described_in_words(value: Any, expected: str) -> None:
    assert describe(value) == expected


def test_table_has_a_column_for_each_candidate_and_marks_what_did_not_run() -> None:
    text = format_measurement(make_measurement("sampling_block", (1024, 2048, 4096), (81.04, 69.0, math.nan)))
    assert text.splitlines() == [
        "### sampling_block",
        "",
        "| µs | 1024 | 2048 | 4096 |",
        "|---|---|---|---|",
        "| 256 rows | 81.0 | 69.0 | - |",
        "",
        "Chosen: 2048 (instead of 1024).",
    ]


def test_entry_is_python_that_makes_the_same_table() -> None:
    entry = replace_field(DEFAULT, "stream_k.rules.1.tile", StreamKTile(256, stages=2, programs=7))
    paths = {"stream_k.rules.1.tile": (4.0, 3.0), "gemv.tile": (1.0, 2.0), "sampling_block": (9.0, 8.0)}
    measurements = {
        path: make_measurement(path, ("first", "second"), micros) for path, micros in paths.items()
    }
    text = format_entry("NVIDIA_H200", entry, measurements)
    for micros in paths.values():
        assert text.count(f"# 256 rows: {micros[0]}; {micros[1]}\n") == 1
    names: dict[str, Any] = {**vars(tuning)}
    exec(text, names)
    assert names["NVIDIA_H200"] == entry
