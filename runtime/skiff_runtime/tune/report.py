"""The report of ``skiff tune``: a table for each tuned number, and the entry for ``kernels.tuning`` as Python."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

from skiff_runtime.kernels.tuning import Tuning
from skiff_runtime.tune.measure import Measurement

INDENT: Final = "    "


def describe(value: Any) -> str:
    """Write a candidate in a few characters: ``128 tokens, 4 warps, 3 stages`` for a tile."""
    if not is_dataclass(value):
        return str(value)
    parts = []
    for field in fields(value):
        number = getattr(value, field.name)
        if number is True:
            parts.append(field.name)
        elif number is not None and number is not False:
            parts.append(f"{number} {field.name}")
    return ", ".join(parts)


def format_measurement(measurement: Measurement) -> str:
    """Format the times of one number as a Markdown table, and the choice."""
    tunable, present, chosen = measurement.tunable, measurement.present, measurement.chosen
    lines = [f"### {tunable.path}", ""]
    lines.append("| µs | " + " | ".join(map(describe, measurement.columns)) + " |")
    lines.append("|---" * (len(measurement.columns) + 1) + "|")
    for workload, micros in zip(tunable.workloads, measurement.micros, strict=True):
        lines.append(f"| {workload.name} | " + " | ".join(map(_format_micros, micros)) + " |")
    verdict = "kept" if chosen == present else f"instead of {describe(present)}"
    return "\n".join([*lines, "", f"Chosen: {describe(chosen)} ({verdict})."])


def format_entry(name: str, tuning: Tuning, measurements: Mapping[str, Measurement]) -> str:
    """Format ``tuning`` as an assignment, each measured field below a comment with its times."""
    return f"{name}: Final = {_format_value(tuning, '', 0, measurements)}"


def _format_value(value: Any, path: str, depth: int, measurements: Mapping[str, Measurement]) -> str:
    inner, outer = INDENT * (depth + 1), INDENT * depth
    if isinstance(value, tuple):
        items = enumerate(value)
        lines = [
            _with_comment(item, _join(path, str(index)), "", depth + 1, measurements) for index, item in items
        ]
        return "(\n" + "".join(lines) + f"{outer})"
    if not is_dataclass(value):
        return repr(value)
    if not _is_group(value):
        given = ", ".join(f"{field.name}={getattr(value, field.name)!r}" for field in fields(value))
        return f"{type(value).__name__}({given})"
    lines = [
        _with_comment(
            getattr(value, field.name), _join(path, field.name), f"{field.name}=", depth + 1, measurements
        )
        for field in fields(value)
    ]
    assert all(line.startswith(inner) for line in lines)
    return f"{type(value).__name__}(\n" + "".join(lines) + f"{outer})"


def _with_comment(
    value: Any, path: str, label: str, depth: int, measurements: Mapping[str, Measurement]
) -> str:
    indent = INDENT * depth
    comments = [
        f"{indent}# {line}\n"
        for measured_path, measurement in measurements.items()
        if measured_path == path
        or (measured_path.startswith(f"{path}.") and not _has_lines_of_its_own(value))
        for line in _format_comment(measurement)
    ]
    return "".join(comments) + f"{indent}{label}{_format_value(value, path, depth, measurements)},\n"


def _format_comment(measurement: Measurement) -> list[str]:
    columns = "; ".join(map(describe, measurement.columns))
    lines = [f"µs by {columns}:"]
    for workload, micros in zip(measurement.tunable.workloads, measurement.micros, strict=True):
        lines.append(f"{workload.name}: " + "; ".join(map(_format_micros, micros)))
    return lines


def _is_group(value: Any) -> bool:
    """Return whether a dataclass groups tuned numbers, and is no tile or rule, which stand on one line."""
    return type(value).__name__.endswith("Tuning")


def _has_lines_of_its_own(value: Any) -> bool:
    return isinstance(value, tuple) or _is_group(value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _format_micros(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"
