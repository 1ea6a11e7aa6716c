"""``skiff bench compare``: two results of ``skiff bench serve`` side by side."""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console

from skiff_runtime.bench.online.dataset import read_file
from skiff_runtime.bench.report import Figures, make_table, write_json
from skiff_runtime.config.arguments import add_renamed_flags
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.errors import ConfigError

DESCRIPTION: Final = """\
Two results of `skiff bench serve --output-json` side by side, rate by rate. The ratio is B
to A: above 1 is better for throughput, below 1 for latency."""
COMPARED_FIGURES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("requests/s", ("requests_per_second",)),
    ("goodput, requests/s", ("goodput_requests_per_second",)),
    ("requests within --goodput", ("slo_met_share",)),
    ("output tokens/s", ("output_tokens_per_second",)),
    *(
        (f"{title} {point}, ms", (key, point))
        for key, title in (("ttft_ms", "TTFT"), ("itl_ms", "ITL"), ("e2e_ms", "end to end"))
        for point in ("p50", "p90", "p99")
    ),
)
"""Names of the figures that are compared, and where they are in the figures of a run."""
_SAME: Final = (
    "backend",
    "input_len",
    "output_len",
    "num_prompts",
    "dataset_name",
    "dataset_path",
    "seed",
    "goodput",
)
"""Options that two comparable results have in common; differences are printed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench compare``."""
    parser.description = DESCRIPTION
    parser.add_argument("a", type=Path, metavar="A.json", help="one result")
    parser.add_argument("b", type=Path, metavar="B.json", help="the other one")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="also write the comparison as JSON")
    add_renamed_flags(parser, {"--output": "--output-json"})


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison, and return the exit code. Raises ConfigError for a file that is no such result."""
    a, b = _read(arguments.a), _read(arguments.b)
    pairs = _pair_runs(a, b, arguments)
    console = Console(highlight=False)
    for name in _SAME:
        if a["options"].get(name) != b["options"].get(name):
            console.print(f"{name} differs: {a['options'].get(name)} and {b['options'].get(name)}")
    compared = {rate: _compare(one, other) for rate, (one, other) in pairs.items()}
    for rate, rows in compared.items():
        console.print(f"\nat {rate} requests per second" if rate[0].isdigit() else f"\nrate: {rate}")
        lines = [(name, *(_format(row[key]) for key in ("a", "b", "ratio"))) for name, row in rows.items()]
        console.print(make_table(("", arguments.a.stem, arguments.b.stem, "ratio"), lines))
    if arguments.output_json is not None:
        write_json(arguments.output_json, {"benchmark": "compare", "rates": compared})
    return EXIT_OK


def _read(path: Path) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(read_file(path, "the file"), type=dict[str, Any])
        rates = [str(each["request_rate"]) for each in found["runs"]]
        if found["benchmark"] != "serve" or not rates or not isinstance(found["options"], dict):
            raise KeyError("benchmark")
    except (msgspec.DecodeError, KeyError, TypeError):
        raise ConfigError(f"{path} is no result of `skiff bench serve --output-json`") from None
    return found


def _pair_runs(
    a: Mapping[str, Any], b: Mapping[str, Any], arguments: argparse.Namespace
) -> dict[str, tuple[Figures, Figures]]:
    """Pair the runs of the same rate. If each file has only one run, pair these, whatever their rates."""
    by_rate = [{each["request_rate"]: each for each in found["runs"]} for found in (a, b)]
    both = {rate: (by_rate[0][rate], by_rate[1][rate]) for rate in by_rate[0] if rate in by_rate[1]}
    if both:
        return both
    if len(by_rate[0]) == len(by_rate[1]) == 1:
        [(one, first)], [(other, second)] = by_rate[0].items(), by_rate[1].items()
        return {f"{one} and {other}": (first, second)}
    raise ConfigError(f"{arguments.a} and {arguments.b} have no request rate in common")


def _compare(a: Figures, b: Figures) -> dict[str, dict[str, float | None]]:
    rows: dict[str, dict[str, float | None]] = {}
    for name, path in COMPARED_FIGURES:
        one, other = get_figure(a, path), get_figure(b, path)
        ratio = None if one is None or other is None or one == 0 else other / one
        rows[name] = {"a": one, "b": other, "ratio": ratio}
    return rows


def get_figure(figures: Figures, path: tuple[str, ...]) -> float | None:
    """Return the figure at a path of keys; None where a run has none."""
    value: Any = figures
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
