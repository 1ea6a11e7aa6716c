"""Plots of latencies over the request rate, of one server or of two. Needs matplotlib, from the extra ``bench``."""

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skiff_runtime.bench.online.server_comparison import NAMES, RateComparison
from skiff_runtime.bench.report import PERCENTILES, Figures
from skiff_runtime.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS: Final = {"ttft_ms": "Time to first token", "itl_ms": "Inter-token latency"}
_OBJECTIVES: Final = {"ttft_ms": "ttft_ms", "itl_ms": "tpot_ms"}
"""Objective that each panel draws as a line: a request's TPOT is the mean of its inter-token latencies."""
_COLOURS: Final = ("#2a6f97", "#e09f3e", "#9e2a2b")
_SERVER_COLOURS: Final = ("#0072b2", "#d55e00")
"""Two of Okabe and Ito's colours, which the colour-blind can distinguish."""
_COMPARED_PERCENTILES: Final = {"p50": "-", "p99": "--"}
_STYLES: Final = ("-", "--", ":", "-.")


def require_matplotlib() -> None:
    """Raise ConfigError if matplotlib is missing; called before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError("--plot needs matplotlib; in Skiff's sources, pip install '.[bench]'") from None


def draw(path: Path, runs: Sequence[Figures], title: str) -> None:
    """Plot percentiles of TTFT and ITL over the finite rates of ``runs``; the file's suffix selects the format.

    Raises:
        ConfigError: the file cannot be written.
    """
    rated = sorted(
        (run for run in runs if _rate(run["request_rate"]) is not None),
        key=lambda run: float(run["request_rate"]),
    )
    figure = _make_figure(title)
    for axes, (key, name) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        _panel(axes, rated, key, name)
    _save(figure, path)


def draw_comparison(path: Path, rates: Sequence[RateComparison], urls: tuple[str, str]) -> None:
    """Plot TTFT and ITL of two servers: over the finite rates if there are several, else the distribution of each rate.

    Points over the rates are medians of the rounds, and the areas around them reach from the least to the largest.

    Raises:
        ConfigError: the file cannot be written.
    """
    rated = sorted(
        (each for each in rates if _rate(each.rate) is not None), key=lambda each: float(each.rate)
    )
    figure = _make_figure(None)
    for axes, (key, name) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for server, url in enumerate(urls):
            label = f"{NAMES[server]} ({url})"
            if len(rated) > 1:
                _draw_rates(axes, rated, key, server, label)
            else:
                _draw_distributions(axes, rates, key, server, label)
        if len(rated) > 1:
            axes.set(title=name, xlabel="requests per second", ylabel="milliseconds")
            axes.set_ylim(bottom=0)
        else:
            axes.set(title=name, xlabel="milliseconds", ylabel="share of the latencies up to this")
            axes.set_xscale("log")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    _save(figure, path)


def _draw_rates(axes: "Axes", rates: Sequence[RateComparison], key: str, server: int, label: str) -> None:
    for point, style in _COMPARED_PERCENTILES.items():
        rows: list[tuple[float, list[float]]] = []
        for each in rates:
            found = [figures[key][point] for figures in each.rounds[server] if figures[key] is not None]
            if found:
                rows.append((float(each.rate), found))
        across = [rate for rate, _ in rows]
        middle = [statistics.median(found) for _, found in rows]
        colour = _SERVER_COLOURS[server]
        axes.plot(across, middle, style, marker="o", color=colour, label=f"{label}, {point}")
        axes.fill_between(
            across,
            [min(f) for _, f in rows],
            [max(f) for _, f in rows],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )


def _draw_distributions(
    axes: "Axes", rates: Sequence[RateComparison], key: str, server: int, label: str
) -> None:
    for each, style in zip(rates, itertools.cycle(_STYLES)):
        latencies = (each.ttft_ms if key == "ttft_ms" else each.itl_ms)[server]
        if latencies:
            name = label if len(rates) == 1 else f"{label}, {each.rate} requests/s"
            axes.ecdf(latencies, linestyle=style, color=_SERVER_COLOURS[server], label=name)


def _make_figure(title: str | None) -> "Figure":
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    if title is not None:
        figure.suptitle(title)
    return figure


def _save(figure: "Figure", path: Path) -> None:
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error


def _panel(axes: "Axes", runs: Sequence[Figures], key: str, name: str) -> None:
    points: list[tuple[float, dict[str, Any]]] = [
        (float(run["request_rate"]), run[key]) for run in runs if run[key] is not None
    ]
    for point, colour in zip(PERCENTILES, _COLOURS, strict=True):
        values = [figures[f"p{point}"] for _, figures in points]
        axes.plot([rate for rate, _ in points], values, marker="o", color=colour, label=f"p{point}")
    limit = runs[0]["slo"][_OBJECTIVES[key]] if runs else None
    if limit is not None:
        axes.axhline(limit, color="grey", linestyle="--", label=f"limit {limit:g} ms")
    axes.set(title=name, xlabel="requests per second", ylabel="milliseconds")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()


def _rate(text: str) -> float | None:
    """Return a rate; None if it is infinite, or that of a recorded trace."""
    try:
        rate = float(text)
    except ValueError:
        return None
    return rate if rate != float("inf") else None
