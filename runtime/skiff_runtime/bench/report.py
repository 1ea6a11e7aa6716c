"""Common parts of the benchmarks' results: figures, percentiles, tables, and files of JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import rich.box
from rich.table import Table

from skiff_runtime.errors import ConfigError

PERCENTILES: Final = (50, 90, 99)
Figures = dict[str, Any]


def summarize_latencies(milliseconds: Sequence[float]) -> Figures | None:
    """Return count, mean, percentiles and maximum of latencies, or None if there are none."""
    if not milliseconds:
        return None
    values = np.asarray(milliseconds)
    points = np.percentile(values, PERCENTILES).tolist()
    named = {f"p{point}": value for point, value in zip(PERCENTILES, points, strict=True)}
    return {"count": len(values), "mean": float(values.mean()), **named, "max": float(values.max())}


def make_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a plain table, whose columns after the first are aligned to the right."""
    table = Table(box=rich.box.SIMPLE_HEAD if any(heads) else rich.box.SIMPLE, show_header=any(heads))
    for index, head in enumerate(heads):
        table.add_column(head, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    return table


def write_json(path: Path, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON. Raises ConfigError if the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output-json {path}: {error.strerror}") from error
