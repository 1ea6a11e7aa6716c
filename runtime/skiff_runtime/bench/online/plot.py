"""Plot of a sweep: latencies over the request rate. Needs matplotlib, from the extra ``bench``."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from skiff_runtime.bench.report import PERCENTILES, Figures
from skiff_runtime.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS: Final = {"ttft_ms": "Time to first token", "itl_ms": "Inter-token latency"}
_OBJECTIVES: Final = {"ttft_ms": "ttft_ms", "itl_ms": "tpot_ms"}
"""Objective that each panel draws as a line: a request's TPOT is the mean of its inter-token latencies."""
_COLOURS: Final = ("#2a6f97", "#e09f3e", "#9e2a2b")


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
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    rated = sorted(
        (run for run in runs if _rate(run) is not None), key=lambda run: float(run["request_rate"])
    )
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    for axes, (key, name) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        _panel(axes, rated, key, name)
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


def _rate(run: Figures) -> float | None:
    try:
        rate = float(run["request_rate"])
    except ValueError:
        return None
    return rate if rate != float("inf") else None
