"""Figures for people and for programs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import rich.box
from rich.console import Console
from rich.table import Table

from skiff_runtime.bench.online.results import LATENCIES, PERCENTILES, Figures
from skiff_runtime.errors import ConfigError


def show_load(figures: Figures) -> None:
    """Print what a load measured."""
    console = Console(highlight=False)
    rows = [
        ("requests", f"{figures['succeeded']} of {figures['requests']} succeeded"),
        ("duration", f"{figures['duration_seconds']:.2f} s"),
        ("throughput", f"{figures['requests_per_second']:.2f} requests/s"),
        ("goodput", _goodput(figures)),
        ("output", f"{figures['output_tokens']} tokens, {figures['output_tokens_per_second']:,.1f} tokens/s"),
        ("prompt and output", f"{figures['total_tokens_per_second']:,.1f} tokens/s"),
        ("most at a time", str(figures["peak_concurrency"])),
    ]
    rows += [(f"failed: {kind}", _failure(figures, kind)) for kind in figures["failures"]]
    console.print(table(("", ""), rows))
    names = ("mean", *(f"p{point}" for point in PERCENTILES), "max")
    lines = [
        (title, *(f"{figures[key][name]:,.2f}" for name in names))
        for key, title in LATENCIES.items()
        if figures[key] is not None
    ]
    console.print(table(("milliseconds", *names), lines))


def show_sweep(runs: Sequence[Figures]) -> None:
    """Print one line for each request rate."""
    heads = ("rate", "req/s", "good/s", "tok/s", "TTFT p50", "p99", "ITL p50", "p99", "failed")
    rows = [
        (
            run["request_rate"],
            f"{run['requests_per_second']:.2f}",
            f"{run['goodput_requests_per_second']:.2f}",
            f"{run['output_tokens_per_second']:,.0f}",
            *(_percentile(run[key], name) for key in ("ttft_ms", "itl_ms") for name in ("p50", "p99")),
            str(sum(run["failures"].values())),
        )
        for run in runs
    ]
    Console(highlight=False).print(table(heads, rows))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table, numbers to the right."""
    drawn = Table(box=rich.box.SIMPLE_HEAD if any(heads) else rich.box.SIMPLE, show_header=any(heads))
    for index, head in enumerate(heads):
        drawn.add_column(head, justify="left" if index == 0 else "right")
    for row in rows:
        drawn.add_row(*row)
    return drawn


def write(path: Path, figures: Mapping[str, Any]) -> None:
    """Write figures as JSON; ConfigError where the file cannot be written."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"--output {path}: {error.strerror}") from error


def _goodput(figures: Figures) -> str:
    limits = [f"{name[:-3].upper()} {ms:g} ms" for name, ms in figures["slo"].items() if ms is not None]
    within = f"within {' and '.join(limits)}" if limits else "no limit given"
    share = f"{figures['slo_met']} of {figures['requests']}"
    return f"{figures['goodput_requests_per_second']:.2f} requests/s ({share}, {within})"


def _percentile(distribution: Figures | None, name: str) -> str:
    return "-" if distribution is None else f"{distribution[name]:,.1f}"


def _failure(figures: Figures, kind: str) -> str:
    example = figures["failure_examples"].get(kind, "")
    return f"{figures['failures'][kind]}" + (f" ({example})" if example else "")
