"""``skiff bench serve``: open-loop load against a running server, at one or more request rates."""

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any, Final

from skiff_runtime import log
from skiff_runtime.bench.flag_types import (
    LengthRange,
    natural_float,
    natural_int,
    positive_float,
    positive_int,
    rates,
)
from skiff_runtime.bench.online import plot
from skiff_runtime.bench.online.arrival_trace import UNITS
from skiff_runtime.bench.online.load_generator import LoadGenerator
from skiff_runtime.bench.online.results import LatencyObjective, show_load, show_sweep, summarize_load
from skiff_runtime.bench.online.runner import COMPLETIONS, PATHS, LoadPlan, fetch_served_model, run_load
from skiff_runtime.bench.online.server_comparison import NAMES, RateComparison, show_comparison
from skiff_runtime.bench.online.sweep import DATASETS, RANDOM, SweepRun, plan_runs
from skiff_runtime.bench.report import Figures, write_json
from skiff_runtime.config.arguments import add_renamed_flags
from skiff_runtime.contract import API_PORT, EXIT_FAILURE, EXIT_OK
from skiff_runtime.errors import ConfigError, SkiffError

DESCRIPTION: Final = """\
Open-loop load against a running server: requests leave at the times of a seeded Poisson
process, or of a recorded trace, no matter how slow the responses to earlier ones are."""
EPILOG: Final = """\
Latencies are those of successful requests, from the moment each was written. The lag of
the client itself is shown apart: if it is not small, the load was not open-loop. Goodput
counts the requests that met all limits of --goodput: ttft, the time to first token, and
tpot, the mean time per output token after it, in milliseconds. Each of several rates is a
run of its own, with its own prompts. The exit code is 0 if each run had a successful request.

examples:
  skiff bench serve                                          100 requests, 4 per second
  skiff bench serve --request-rate inf --max-concurrency 64  as fast as 64 at a time go
  skiff bench serve --request-rate 1,2,4,8 --goodput ttft:500 tpot:50 \\
      --output-json result.json --plot result.png            a sweep, with goodput and a plot
  skiff bench serve --dataset-name trace --dataset-path traffic.csv    recorded arrivals and lengths
  skiff bench serve --backend openai-chat --dataset-name sharegpt --dataset-path sharegpt.json
  skiff bench serve --dataset-name generated-shared-prefix --gsp-num-groups 8
  skiff bench serve --compare http://127.0.0.1:8001 --request-rate 1,2,4,8    two servers in turns, in one picture
  skiff bench compare before.json after.json                 two results side by side
"""
LAG_WARNING_MS: Final = 20.0
ROUNDS: Final = 4
"""Rounds of --compare; an even number, so that each server is the first one equally often."""
_NEVER_WRITTEN: Final = ("command", "api_key", "compare_api_key")
RENAMED_FLAGS: Final = {
    "--url": "--base-url",
    "--endpoint": "--backend openai|openai-chat",
    "--warmup": "--num-warmups",
    "--slo-ttft-ms": "--goodput ttft:MS",
    "--slo-itl-ms": "--goodput tpot:MS",
    "--dataset": "--dataset-name sharegpt|custom --dataset-path FILE",
    "--trace": "--dataset-name trace --dataset-path FILE",
    "--prefix-groups": "--dataset-name generated-shared-prefix --gsp-num-groups N",
    "--prompts-per-group": "--gsp-prompts-per-group",
    "--prefix-len": "--gsp-system-prompt-len",
    "--vocabulary": "--vocab-size",
    "--output": "--output-json",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench serve``. Those that vLLM or SGLang have, too, have their names."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_server(parser.add_argument_group("server"))
    _add_load(parser.add_argument_group("load"))
    _add_dataset(parser.add_argument_group("requests"))
    _add_result(parser.add_argument_group("result"))
    add_renamed_flags(parser, RENAMED_FLAGS)


def _add_server(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--base-url",
        default=f"http://127.0.0.1:{API_PORT}",
        metavar="URL",
        help="the server (default: %(default)s)",
    )
    group.add_argument("--model", metavar="NAME", help="served name (default: the first one listed)")
    group.add_argument(
        "--compare",
        metavar="URL",
        help="a second server, which gets the same requests in turn with the first; --plot then draws both",
    )
    group.add_argument(
        "--compare-model",
        metavar="NAME",
        help="served name at the second server (default: the first one listed)",
    )
    group.add_argument(
        "--compare-api-key",
        metavar="KEY",
        help="API key of the second server; that of --api-key is not sent there (default: none)",
    )
    group.add_argument(
        "--compare-rounds",
        type=positive_int,
        default=ROUNDS,
        metavar="N",
        help="runs of each rate on each server, with other prompts in each round; the servers take turns in being the "
        "first (default: %(default)s)",
    )
    group.add_argument(
        "--backend",
        choices=sorted(PATHS),
        default=COMPLETIONS,
        help="openai sends token ids to /v1/completions, openai-chat words to /v1/chat/completions "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--api-key",
        default=os.environ.get("SKIFF_API_KEY", "").partition(",")[0] or None,
        metavar="KEY",
        help="the server's API key, if it requires one (default: the first of $SKIFF_API_KEY)",
    )


def _add_load(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--num-prompts",
        type=positive_int,
        metavar="N",
        help="requests of a run (default: 100, or all of a trace)",
    )
    group.add_argument(
        "--request-rate",
        type=rates,
        metavar="R,...",
        help="requests per second, one run for each rate; inf: all at once (default: 4, or as recorded)",
    )
    group.add_argument(
        "--max-concurrency",
        type=positive_int,
        metavar="N",
        help="maximum number of requests in flight; further ones wait (default: no limit)",
    )
    group.add_argument(
        "--num-warmups",
        type=natural_int,
        default=1,
        metavar="N",
        help="uncounted requests before each run (default: %(default)s)",
    )
    group.add_argument(
        "--timeout-seconds",
        type=positive_float,
        default=600.0,
        metavar="S",
        help="time limit of a request (default: %(default)s)",
    )
    group.add_argument(
        "--max-seconds",
        type=positive_float,
        default=3600.0,
        metavar="S",
        help="time limit of a run (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=natural_int,
        default=0,
        metavar="N",
        help="seed of prompts, lengths and arrivals (default: %(default)s)",
    )


def _add_dataset(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--dataset-name",
        choices=DATASETS,
        default=RANDOM,
        help="random prompts; ShareGPT's JSON; custom: JSON lines with prompt or messages; random prompts in groups "
        "that share a prefix; or a trace: CSV or JSON lines with timestamp, input length and output length of each "
        "request, JSON lines also with hash_ids (default: %(default)s)",
    )
    group.add_argument(
        "--dataset-path", type=Path, metavar="FILE", help="file of the sharegpt, custom or trace dataset"
    )
    group.add_argument(
        "--input-len",
        type=LengthRange.parse,
        metavar="LEN",
        help="prompt length in tokens, or LOW:HIGH (default: 128)",
    )
    group.add_argument(
        "--output-len",
        type=LengthRange.parse,
        metavar="LEN",
        help="output length in tokens, or LOW:HIGH (default: 64, or that of a recorded answer)",
    )
    group.add_argument(
        "--vocab-size",
        type=positive_int,
        default=1000,
        metavar="N",
        help="bound of random token ids (default: %(default)s)",
    )
    group.add_argument(
        "--trace-unit",
        choices=sorted(UNITS),
        default="s",
        help="unit of a trace's timestamps, if they are numbers (default: %(default)s)",
    )
    group.add_argument(
        "--trace-block-size",
        type=positive_int,
        default=16,
        metavar="N",
        help="tokens for each of a trace's hash_ids; prompts have the same tokens where these are the same "
        "(default: %(default)s)",
    )
    for name, default, text in (
        ("--gsp-num-groups", 64, "generated-shared-prefix: number of prefixes"),
        ("--gsp-prompts-per-group", 16, "generated-shared-prefix: prompts with the same prefix"),
        (
            "--gsp-system-prompt-len",
            1024,
            "generated-shared-prefix: tokens of a prefix; --input-len more follow",
        ),
    ):
        group.add_argument(
            name, type=positive_int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--temperature",
        type=natural_float,
        default=0.6,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="request outputs of full length; not all servers support it (default: yes)",
    )


def _add_result(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--goodput",
        type=_parse_goodput,
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="limits in milliseconds that a request must meet to count: ttft, tpot, or both, as in ttft:500 tpot:50",
    )
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures as JSON")
    group.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="plot TTFT and ITL over the request rates; .png, .svg or .pdf (default with --compare: comparison.png)",
    )


def _parse_goodput(text: str) -> tuple[str, float]:
    """Parse ``ttft:500`` or ``tpot:50``."""
    metric, colon, limit = text.partition(":")
    if metric not in ("ttft", "tpot") or not colon:
        raise argparse.ArgumentTypeError(f"must be ttft:MS or tpot:MS, not {text!r}")
    return metric, positive_float(limit)


def run(arguments: argparse.Namespace) -> int:
    """Run all rates, print and write the figures, and return the exit code. Raises SkiffError without a server.

    The file is written after each rate, so that an interrupted sweep leaves the rates that it has measured.
    """
    log.configure("bench", "info")
    objective = _make_objective(arguments)
    if arguments.compare is not None:
        return _compare(arguments, objective)
    if arguments.plot is not None:
        plot.require_matplotlib()
    measured: list[Figures] = []
    options: dict[str, Any] = {}
    for each in plan_runs(arguments):
        options = options or _collect_options(arguments, each.plan)
        _, figures = _measure(each, arguments, objective, title=f"{each.rate} requests/s")
        show_load(figures)
        measured.append(figures)
        if arguments.output_json is not None:
            write_json(arguments.output_json, {"benchmark": "serve", "options": options, "runs": measured})
        if arguments.plot is not None:
            plot.draw(arguments.plot, measured, f"{options['model']}, {options['backend']}")
    if len(measured) > 1:
        show_sweep(measured)
    return EXIT_OK if all(figures["succeeded"] for figures in measured) else EXIT_FAILURE


def _make_objective(arguments: argparse.Namespace) -> LatencyObjective:
    limits = dict(arguments.goodput)
    if len(limits) < len(arguments.goodput):
        raise ConfigError("--goodput names a metric twice")
    return LatencyObjective(ttft_ms=limits.get("ttft"), tpot_ms=limits.get("tpot"))


def _compare(arguments: argparse.Namespace, objective: LatencyObjective) -> int:
    """Run all rates on two servers in alternating order; print, write and draw the comparison; return the exit code."""
    plot.require_matplotlib()
    picture = arguments.plot or Path("comparison.png")
    key = arguments.compare_api_key
    model = arguments.compare_model or fetch_served_model(arguments.compare, key=key)
    rates: dict[str, RateComparison] = {}
    options: dict[str, Any] = {}
    for repetition in range(arguments.compare_rounds):
        for run in plan_runs(arguments, repetition):
            options = options or {**_collect_options(arguments, run.plan), "compare_model": model}
            comparison = rates.setdefault(run.rate, RateComparison(run.rate))
            runs = (run, run.redirect(arguments.compare, model, key))
            for server in (0, 1) if repetition % 2 == 0 else (1, 0):
                title = f"{NAMES[server]}, {run.rate} requests/s, round {repetition + 1}"
                load, figures = _measure(runs[server], arguments, objective, title=title)
                comparison.add(server, load, figures)
        found = list(rates.values())
        if arguments.output_json is not None:
            summaries = [
                {
                    "request_rate": each.rate,
                    "a": each.rounds[0],
                    "b": each.rounds[1],
                    "summary": each.summarize(),
                }
                for each in found
            ]
            write_json(
                arguments.output_json,
                {"benchmark": "serve-comparison", "options": options, "rates": summaries},
            )
        plot.draw_comparison(picture, found, (arguments.base_url, arguments.compare))
    show_comparison(found, (arguments.base_url, arguments.compare))
    print(f"wrote {picture}")
    ok = all(figures["succeeded"] for each in found for runs in each.rounds for figures in runs)
    return EXIT_OK if ok else EXIT_FAILURE


def _measure(
    run: SweepRun, arguments: argparse.Namespace, objective: LatencyObjective, *, title: str
) -> tuple[LoadGenerator, Figures]:
    _warm_up(run.warm_up)
    load, seconds = run_load(run.plan, title=title)
    figures = {"request_rate": run.rate, **summarize_load(load, seconds, objective)}
    _warn_of_lag(figures, arguments)
    return load, figures


def _warm_up(plan: LoadPlan) -> None:
    """Send the warm-up requests. Raises SkiffError if the server refuses them, before any load is sent."""
    if not plan.samples:
        return
    load, _ = run_load(plan, title="warm-up")
    failed = [each for each in load.records if each.failure]
    if failed:
        raise SkiffError(f"the warm-up request failed ({failed[0].failure}): {failed[0].detail}")


def _warn_of_lag(figures: Figures, arguments: argparse.Namespace) -> None:
    lag = figures["client_lag_ms"]
    open_loop = arguments.max_concurrency is None and figures["request_rate"] != "inf"
    if open_loop and lag is not None and lag["p99"] > LAG_WARNING_MS:
        print(
            f"The client itself was late (p99 {lag['p99']:.0f} ms), so the load was not open-loop: "
            "give it a core of its own, or lower --request-rate.",
            file=sys.stderr,
        )


def _collect_options(arguments: argparse.Namespace, plan: LoadPlan) -> dict[str, Any]:
    """Return the flags without the API keys, and the values that were derived where a flag was not given."""
    given = {name: value for name, value in vars(arguments).items() if name not in _NEVER_WRITTEN}
    plain = {
        name: value if isinstance(value, bool | int | float | None) else str(value)
        for name, value in given.items()
    }
    request_rates = (
        None if arguments.request_rate is None else ",".join(f"{each:g}" for each in arguments.request_rate)
    )
    return {
        **plain,
        "goodput": " ".join(f"{metric}:{limit:g}" for metric, limit in arguments.goodput),
        "request_rate": request_rates,
        "model": plan.model,
        "num_prompts": len(plan.samples),
        "python": platform.python_version(),
    }
