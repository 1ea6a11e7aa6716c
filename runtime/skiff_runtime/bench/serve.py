"""``skiff bench serve``: open-loop load against a running server."""

import argparse
import platform
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from skiff_runtime import log
from skiff_runtime.bench import report
from skiff_runtime.bench.load import Limits
from skiff_runtime.bench.results import Figures, summarize
from skiff_runtime.bench.runner import PATHS, Plan, measure, served_model
from skiff_runtime.bench.values import (
    Span,
    natural_float,
    natural_int,
    positive_float,
    positive_int,
    rate,
)
from skiff_runtime.bench.workload import Sample, arrivals, random_texts, random_tokens, read_dataset
from skiff_runtime.contract import API_PORT, EXIT_FAILURE, EXIT_OK
from skiff_runtime.errors import SkiffError

DESCRIPTION: Final = """\
Open-loop load against a running server: requests leave at the moments of a seeded Poisson
process, however slow the answers to earlier ones are, as users do."""
EPILOG: Final = """\
Latencies are those of the requests that succeeded, from the moment each was written. How
late the client itself was is shown apart: where that is not small, the load was not open.
The exit code is 0 when at least one request succeeded.

examples:
  skiff bench serve                                          100 requests, 4 a second
  skiff bench serve --request-rate inf --max-concurrency 64  as fast as 64 at a time go
  skiff bench serve --input-len 100:1024 --output-len 100:1024 --num-prompts 256 --output result.json
  skiff bench serve --endpoint chat --dataset questions.jsonl --request-rate 8
"""
LAG_WARNING_MS: Final = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench serve``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url", default=f"http://127.0.0.1:{API_PORT}", help="the server (default: %(default)s)"
    )
    server.add_argument("--model", metavar="NAME", help="served name (default: the first one)")
    server.add_argument(
        "--endpoint",
        choices=sorted(PATHS),
        default="completions",
        help="completions sends token ids, chat sends words (default: %(default)s)",
    )
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    result = parser.add_argument_group("result")
    result.add_argument(
        "--goodput-ttft-ms", type=positive_float, metavar="MS", help="goodput: first token by then"
    )
    result.add_argument(
        "--goodput-tpot-ms", type=positive_float, metavar="MS", help="goodput: time per token below"
    )
    result.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")


def _add_load(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--num-prompts", type=positive_int, default=100, metavar="N", help="requests (default: %(default)s)"
    )
    group.add_argument(
        "--request-rate",
        type=rate,
        default=4.0,
        metavar="R",
        help="a second; inf: all at once (default: %(default)s)",
    )
    group.add_argument(
        "--max-concurrency", type=positive_int, metavar="N", help="hold back beyond so many at a time"
    )
    group.add_argument(
        "--warmup",
        type=natural_int,
        default=1,
        metavar="N",
        help="requests before, not counted (default: %(default)s)",
    )
    group.add_argument(
        "--timeout-seconds",
        type=positive_float,
        default=600.0,
        metavar="S",
        help="of one request (default: %(default)s)",
    )
    group.add_argument(
        "--max-seconds",
        type=positive_float,
        default=3600.0,
        metavar="S",
        help="of the run (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=natural_int,
        default=0,
        metavar="N",
        help="of prompts, lengths, arrivals (default: %(default)s)",
    )


def _add_requests(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--input-len",
        type=Span.parse,
        default=Span(128, 128),
        metavar="LEN",
        help="tokens, or LOW:HIGH (default: %(default)s)",
    )
    group.add_argument(
        "--output-len",
        type=Span.parse,
        default=Span(64, 64),
        metavar="LEN",
        help="tokens, or LOW:HIGH (default: %(default)s)",
    )
    group.add_argument(
        "--vocabulary",
        type=positive_int,
        default=1000,
        metavar="N",
        help="random token ids are below it (default: %(default)s)",
    )
    group.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="JSON lines with prompt or messages, instead of random ones",
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
        help="have every answer as long as asked for; not every server knows this (default: yes)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and write the figures; the exit code. SkiffError where no server answers."""
    log.configure("bench", "info")
    plan, warm_up = _plans(arguments)
    _warm_up(warm_up)
    load, seconds = measure(plan, title="requests")
    figures = summarize(
        load, seconds, ttft_limit_ms=arguments.goodput_ttft_ms, tpot_limit_ms=arguments.goodput_tpot_ms
    )
    report.show_load(figures)
    _warn_of_lag(figures, arguments)
    if arguments.output is not None:
        report.write(arguments.output, {"benchmark": "serve", "options": _options(arguments), **figures})
    return EXIT_OK if figures["succeeded"] else EXIT_FAILURE


def _plans(arguments: argparse.Namespace) -> tuple[Plan, Plan]:
    """The load and its warm-up, which has prompts of its own, so that none is found in a prefix cache."""
    generator = np.random.default_rng(arguments.seed)
    count, extra = arguments.num_prompts, arguments.warmup
    samples = _samples(arguments, count + extra, generator)
    plan = Plan(
        url=arguments.url,
        model=arguments.model or served_model(arguments.url),
        endpoint=arguments.endpoint,
        samples=samples[:count],
        arrivals=arrivals(count, arguments.request_rate, generator),
        temperature=arguments.temperature,
        seed=arguments.seed,
        ignore_eos=arguments.ignore_eos,
        limits=Limits(arguments.max_concurrency, arguments.timeout_seconds, arguments.max_seconds),
    )
    return plan, replace(plan, samples=samples[count:], arrivals=[0.0] * extra)


def _samples(arguments: argparse.Namespace, count: int, generator: np.random.Generator) -> list[Sample]:
    chat = arguments.endpoint == "chat"
    if arguments.dataset is not None:
        return read_dataset(arguments.dataset, count, arguments.output_len, chat=chat, generator=generator)
    if chat:
        return random_texts(count, arguments.input_len, arguments.output_len, generator)
    return random_tokens(count, arguments.input_len, arguments.output_len, arguments.vocabulary, generator)


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
    open_loop = arguments.max_concurrency is None and arguments.request_rate != float("inf")
    if open_loop and lag is not None and lag["p99"] > LAG_WARNING_MS:
        print(
            f"The client was late itself (p99 {lag['p99']:.0f} ms): the load was not as open as asked for; "
            "give it a core of its own or lower --request-rate.",
            file=sys.stderr,
        )


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name, value in vars(arguments).items() if name != "command"}
    plain = {
        name: value if isinstance(value, bool | int | float | None) else str(value)
        for name, value in given.items()
    }
    return {**plain, "request_rate": str(arguments.request_rate), "python": platform.python_version()}
