"""``skiff bench overhead``: what a request and a token cost each process of a server, in CPU time."""

import argparse
import contextlib
import os
import platform
import shlex
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Final

from rich.console import Console

from skiff_runtime import log
from skiff_runtime.bench import report
from skiff_runtime.bench.cost import Cost, Meter, Traffic, costs
from skiff_runtime.bench.cpu_time import FRONTS, service_processes
from skiff_runtime.bench.flag_types import Span, positive_int
from skiff_runtime.bench.online.results import Figures
from skiff_runtime.bench.online.runner import PATHS, served_model
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.errors import ConfigError
from skiff_runtime.processes.local_server import LocalServer

DESCRIPTION: Final = """\
CPU time that each process of a server spends on a request and on a token, as the operating
system counts it, under real load over HTTP."""
EPILOG: Final = """\
Two loads are sent, alike but for the length of the answers: one token, then --output-len.
Their difference is what tokens cost, the rest is what requests cost; what the processes
use when idle is measured first and taken off. Where no server is given, `skiff serve` is
started for the measurement.

examples:
  skiff bench overhead                                       the demo model, its own server
  skiff bench overhead --serve-flags "--tokenizer-worker-num 0"
  skiff bench overhead --url http://127.0.0.1:8000 --pid $(pgrep -of "skiff serve") --output overhead.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench overhead``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="a server of this machine that runs already; needs --pid")
    server.add_argument("--pid", type=positive_int, help="process id of its `skiff serve`")
    server.add_argument(
        "--serve-flags",
        default="--model demo://",
        metavar="FLAGS",
        help="for the server that is started (default: %(default)s)",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--endpoint", choices=sorted(PATHS), default="chat", help="default: %(default)s")
    load.add_argument(
        "--num-prompts",
        type=positive_int,
        default=500,
        metavar="N",
        help="of each load (default: %(default)s)",
    )
    load.add_argument(
        "--concurrency", type=positive_int, default=32, metavar="N", help="at a time (default: %(default)s)"
    )
    load.add_argument(
        "--input-len", type=Span.parse, default=Span(32, 32), metavar="LEN", help="default: %(default)s"
    )
    load.add_argument(
        "--output-len",
        type=positive_int,
        default=64,
        metavar="N",
        help="of the second load (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and write the figures; the exit code."""
    log.configure("bench", "info")
    if (arguments.url is None) != (arguments.pid is None):
        raise ConfigError(
            "--url and --pid belong together: the server that is sent to must be the one watched"
        )
    if arguments.output_len < 2:
        raise ConfigError("--output-len must be at least 2, for a load of one token is compared with it")
    with contextlib.ExitStack() as stack:
        url, pid = arguments.url, arguments.pid
        if url is None:
            server = stack.enter_context(LocalServer(shlex.split(arguments.serve_flags)))
            url, pid = server.url, server.pid
        figures = _measure(arguments, url, pid)
    _show(figures)
    if arguments.output is not None:
        report.write(arguments.output, figures)
    return EXIT_OK


def _measure(arguments: argparse.Namespace, url: str, pid: int) -> Figures:
    processes = service_processes(pid)
    traffic = Traffic(
        url=url,
        model=served_model(url),
        endpoint=arguments.endpoint,
        count=arguments.num_prompts,
        concurrency=arguments.concurrency,
        inputs=arguments.input_len,
    )
    meter = Meter(processes, traffic)
    short = meter.sample(output_tokens=1, seed=2)
    long = meter.sample(output_tokens=arguments.output_len, seed=3)
    by_name = costs(short, long)
    fronts = [by_name[each.name] for each in processes if each.role in FRONTS]
    return {
        "benchmark": "overhead",
        "traffic": {**asdict(traffic), "output_len": arguments.output_len},
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "requests": short.requests + long.requests,
        "output_tokens": short.tokens + long.tokens,
        "seconds": short.seconds + long.seconds,
        "processes": {name: asdict(cost) for name, cost in by_name.items()},
        "fronts": asdict(_sum(fronts)),
    }


def _sum(parts: list[Cost]) -> Cost:
    return Cost(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))


def _show(figures: Figures) -> None:
    named = [*figures["processes"].items(), ("api + tokenizers + detokenizer", figures["fronts"])]
    rows = [
        (
            name,
            f"{cost['us_per_request']:,.0f}",
            f"{cost['us_per_token']:,.1f}",
            f"{round(100 * cost['busy_ratio'])}%",
        )
        for name, cost in named
    ]
    console = Console(highlight=False)
    console.print(
        f"{figures['requests']} requests, {figures['output_tokens']} tokens in {figures['seconds']:.1f} s, "
        f"{figures['traffic']['concurrency']} at a time"
    )
    console.print(report.table(("process", "CPU-us a request", "CPU-us a token", "busy"), rows))
