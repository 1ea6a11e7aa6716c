"""``skiff bench serve``: open-loop load against a running server, at one or more request rates."""

import argparse
import platform
import sys
from typing import Any, Final

from skiff_runtime import log
from skiff_runtime.bench import report
from skiff_runtime.bench.online import plot
from skiff_runtime.bench.online.results import Figures, Objective, summarize
from skiff_runtime.bench.online.runner import Plan, measure
from skiff_runtime.bench.online.sweep import Run, runs
from skiff_runtime.bench.serve_options import add_arguments
from skiff_runtime.contract import EXIT_FAILURE, EXIT_OK
from skiff_runtime.errors import SkiffError

LAG_WARNING_MS: Final = 20.0
__all__ = ["add_arguments", "run"]


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and write the figures; the exit code. SkiffError where no server answers.

    The file is written after each rate, so that a sweep that is cut short leaves what it has.
    """
    log.configure("bench", "info")
    if arguments.plot is not None:
        plot.require_matplotlib()
    measured: list[Figures] = []
    options: dict[str, Any] = {}
    for each in runs(arguments):
        options = options or _options(arguments, each.plan)
        measured.append(_measure(each, arguments))
        if arguments.output is not None:
            report.write(arguments.output, {"benchmark": "serve", "options": options, "runs": measured})
        if arguments.plot is not None:
            plot.draw(arguments.plot, measured, f"{options['model']}, {options['endpoint']}")
    if len(measured) > 1:
        report.show_sweep(measured)
    return EXIT_OK if all(figures["succeeded"] for figures in measured) else EXIT_FAILURE


def _measure(run: Run, arguments: argparse.Namespace) -> Figures:
    _warm_up(run.warm_up)
    load, seconds = measure(run.plan, title=f"{run.rate} requests/s")
    objective = Objective(arguments.slo_ttft_ms, arguments.slo_itl_ms)
    figures = {"request_rate": run.rate, **summarize(load, seconds, objective)}
    report.show_load(figures)
    _warn_of_lag(figures, arguments)
    return figures


def _warm_up(plan: Plan) -> None:
    """Also the moment to notice, before any load, that the server refuses such requests."""
    if not plan.samples:
        return
    load, _ = measure(plan, title="warm-up")
    failed = [each for each in load.exchanges if each.failure]
    if failed:
        raise SkiffError(f"the server fails such a request ({failed[0].failure}): {failed[0].detail}")


def _warn_of_lag(figures: Figures, arguments: argparse.Namespace) -> None:
    lag = figures["client_lag_ms"]
    open_loop = arguments.max_concurrency is None and figures["request_rate"] != "inf"
    if open_loop and lag is not None and lag["p99"] > LAG_WARNING_MS:
        print(
            f"The client was late itself (p99 {lag['p99']:.0f} ms): the load was not as open as asked for; "
            "give it a core of its own or lower --request-rate.",
            file=sys.stderr,
        )


def _options(arguments: argparse.Namespace, plan: Plan) -> dict[str, Any]:
    """The flags as given, less the key, and what they led to where they were left out."""
    given = {name: value for name, value in vars(arguments).items() if name not in ("command", "api_key")}
    plain = {
        name: value if isinstance(value, bool | int | float | None) else str(value)
        for name, value in given.items()
    }
    rates = (
        None if arguments.request_rate is None else ",".join(f"{each:g}" for each in arguments.request_rate)
    )
    return {
        **plain,
        "request_rate": rates,
        "model": plan.model,
        "num_prompts": len(plan.samples),
        "python": platform.python_version(),
    }
