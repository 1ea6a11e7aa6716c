"""Comparison of two servers on the same requests: figures of each round, and ratios of the rounds.

Both servers get the same prompts at the same moments, one server after the other; in the next round the other one is
the first, with new prompts. A machine that becomes slower during the benchmark then hits both alike. A ratio compares
two runs of one round; the range of the ratios over the rounds shows how much of a difference is noise.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rich.console import Console

from skiff_runtime.bench.online.compare import COMPARED_FIGURES, get_figure
from skiff_runtime.bench.online.load_generator import LoadGenerator
from skiff_runtime.bench.online.request_record import OK
from skiff_runtime.bench.report import Figures, make_table

NAMES: Final = ("A", "B")


@dataclass(slots=True)
class RateComparison:
    """The rounds of one request rate. Each list has one entry for each server.

    ``rounds``: figures of a run, by round. ``ttft_ms`` and ``itl_ms``: the latencies of all rounds, for the distribution.
    """

    rate: str
    rounds: tuple[list[Figures], list[Figures]] = field(default_factory=lambda: ([], []))
    ttft_ms: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))
    itl_ms: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))

    def add(self, server: int, load: LoadGenerator, figures: Figures) -> None:
        """Add one run of one server."""
        self.rounds[server].append(figures)
        for each in load.records:
            if each.failure == OK:
                self.ttft_ms[server].append(1e3 * (each.first_at - each.sent_at))
                self.itl_ms[server].extend(1e3 * itl for itl in each.itls)

    def summarize(self) -> dict[str, dict[str, Any]]:
        """Return, by the name of each figure: the median of each server, and median, least and largest ratio of B to A."""
        return {name: self._summarize_figure(path) for name, path in COMPARED_FIGURES}

    def _summarize_figure(self, path: tuple[str, ...]) -> dict[str, Any]:
        pairs = [
            (a, b)
            for one, other in zip(*self.rounds, strict=True)
            if (a := get_figure(one, path)) is not None and (b := get_figure(other, path)) is not None
        ]
        ratios = [b / a for a, b in pairs if a]
        return {
            "a": statistics.median(a for a, _ in pairs) if pairs else None,
            "b": statistics.median(b for _, b in pairs) if pairs else None,
            "ratio": statistics.median(ratios) if ratios else None,
            "ratio_min": min(ratios, default=None),
            "ratio_max": max(ratios, default=None),
            "rounds": len(ratios),
        }

    def count_failures(self, server: int) -> int:
        """Return the number of failed requests of one server in all rounds."""
        return sum(sum(figures["failures"].values()) for figures in self.rounds[server])


def show_comparison(rates: Sequence[RateComparison], urls: tuple[str, str]) -> None:
    """Print a table for each rate."""
    console = Console(highlight=False)
    for name, url in zip(NAMES, urls, strict=True):
        console.print(f"{name}: {url}")
    for each in rates:
        rounds = len(each.rounds[0])
        console.print(f"\n{each.rate} requests/s, median of {rounds} rounds")
        rows = [_format_row(name, figure, rounds) for name, figure in each.summarize().items()]
        failed = [each.count_failures(server) for server in range(len(NAMES))]
        rows.append(("failed requests", *map(str, failed), "", ""))
        console.print(make_table(("", *NAMES, "B/A", "range of the rounds"), rows))
    console.print(
        "A range that contains 1 does not show a difference. Without a difference, the range of a row lies on one side of "
        "1 with a probability of 2 / 2^N for N rounds; with many rows, expect some."
    )


def _format_row(name: str, figure: dict[str, Any], rounds: int) -> tuple[str, ...]:
    """Return the cells of one figure. The range names the number of its rounds where some have no figure."""
    values = [figure[key] for key in ("a", "b", "ratio")]
    span = "-" if figure["ratio"] is None else f"{figure['ratio_min']:.2f} to {figure['ratio_max']:.2f}"
    if 0 < figure["rounds"] < rounds:
        span += f" ({figure['rounds']} rounds)"
    return (name, *("-" if value is None else f"{value:,.2f}" for value in values), span)
