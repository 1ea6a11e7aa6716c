"""``skiff bench overhead``: CPU time that each process of a server spends on a request and on a token."""

import argparse
import contextlib
import os
import platform
import shlex
import time
from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console

from skiff_runtime import log
from skiff_runtime.bench.cpu_time import FRONTEND_ROLES, ServiceProcess, cpu_seconds, find_service_processes
from skiff_runtime.bench.flag_types import LengthRange, positive_int
from skiff_runtime.bench.online.load_generator import LoadLimits
from skiff_runtime.bench.online.runner import CHAT, PATHS, LoadPlan, fetch_served_model, run_load
from skiff_runtime.bench.report import Figures, make_table, write_json
from skiff_runtime.bench.workload import draw_chat_prompts, draw_token_prompts
from skiff_runtime.config.arguments import add_renamed_flags
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.errors import ConfigError, SkiffError
from skiff_runtime.processes.local_server import LocalServer

DESCRIPTION: Final = """\
CPU time that each process of a server spends on a request and on a token, as the operating
system counts it, under real load over HTTP."""
EPILOG: Final = """\
Two loads are sent that differ only in the length of the outputs: one token, then
--output-len. Their difference is the cost of tokens, the rest that of requests. The CPU
time of the idle processes is measured first and subtracted. Without --base-url, a
`skiff serve` is started for the measurement.

examples:
  skiff bench overhead                                       the demo model, on a server of its own
  skiff bench overhead --serve-flags "--tokenizer-worker-num 0"
  skiff bench overhead --base-url http://127.0.0.1:8000 --pid $(pgrep -of "skiff serve") --output-json overhead.json
"""
IDLE_SECONDS: Final = 3.0
WARM_UP_REQUESTS: Final = 64
VOCAB_SIZE: Final = 1000
REQUEST_SECONDS: Final = 600.0
LOAD_SECONDS: Final = 3600.0
RENAMED_FLAGS: Final = {
    "--url": "--base-url",
    "--endpoint": "--backend openai|openai-chat",
    "--concurrency": "--max-concurrency",
    "--output": "--output-json",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadLoad:
    """The part that both loads have in common: ``count`` requests, at most ``max_concurrency`` at a time."""

    url: str
    model: str
    backend: str
    count: int
    max_concurrency: int
    inputs: LengthRange


@dataclass(frozen=True, slots=True)
class CpuCost:
    """CPU time of one process. ``busy_ratio``: its share of one core while the loads lasted."""

    us_per_request: float
    us_per_token: float
    busy_ratio: float


@dataclass(frozen=True, slots=True)
class LoadCost:
    """Cost of one load. ``cpu``: seconds by process, without those of idle processes."""

    seconds: float
    requests: int
    tokens: int
    cpu: Mapping[str, float]


class CpuMeter:
    """Measures the processes of one service under load."""

    def __init__(self, processes: list[ServiceProcess], load: OverheadLoad) -> None:
        """Warm the service up and measure its idle CPU time. Raises SkiffError if a request fails."""
        self._processes = processes
        self._load = load
        self._send(output_tokens=4, seed=1, count=WARM_UP_REQUESTS)
        before = cpu_seconds(processes)
        time.sleep(IDLE_SECONDS)
        after = cpu_seconds(processes)
        self._idle = {name: (after[name] - before[name]) / IDLE_SECONDS for name in before}

    def measure(self, *, output_tokens: int, seed: int) -> LoadCost:
        """Send the load with outputs of ``output_tokens`` tokens, and return its cost."""
        before = cpu_seconds(self._processes)
        seconds, tokens = self._send(output_tokens=output_tokens, seed=seed, count=self._load.count)
        after = cpu_seconds(self._processes)
        cpu = {name: after[name] - before[name] - self._idle[name] * seconds for name in before}
        return LoadCost(seconds, self._load.count, tokens, cpu)

    def _send(self, *, output_tokens: int, seed: int, count: int) -> tuple[float, int]:
        """Send ``count`` requests. Returns the duration in seconds and the number of output tokens."""
        load, outputs = self._load, LengthRange(output_tokens, output_tokens)
        generator = np.random.default_rng(seed)
        if load.backend == CHAT:
            samples = draw_chat_prompts(count, load.inputs, outputs, generator)
        else:
            samples = draw_token_prompts(count, load.inputs, outputs, VOCAB_SIZE, generator)
        plan = LoadPlan(
            url=load.url,
            model=load.model,
            backend=load.backend,
            samples=samples,
            arrivals=[0.0] * count,
            temperature=0.0,
            seed=seed,
            ignore_eos=True,
            limits=LoadLimits(load.max_concurrency, REQUEST_SECONDS, LOAD_SECONDS),
        )
        run, seconds = run_load(plan, title=f"{count} requests of {output_tokens} tokens")
        for each in run.records:
            if each.failure:
                raise SkiffError(f"a request failed ({each.failure}): {each.detail}")
        if run.unsent:
            raise SkiffError(f"{run.unsent} requests could not be sent within {LOAD_SECONDS:g} s")
        return seconds, sum(each.output_tokens for each in run.records)


def compute_costs(short: LoadCost, long: LoadCost) -> dict[str, CpuCost]:
    """Split the cost of two loads into that of a request and that of a token, by process.

    The longer outputs' additional cost, divided by their additional tokens, is that of a token.
    """
    found = {}
    more_tokens = long.tokens / long.requests - short.tokens / short.requests
    for name in short.cpu:
        of_short, of_long = short.cpu[name] / short.requests, long.cpu[name] / long.requests
        per_token = (of_long - of_short) / more_tokens
        per_request = of_short - per_token * short.tokens / short.requests
        busy = (short.cpu[name] + long.cpu[name]) / (short.seconds + long.seconds)
        found[name] = CpuCost(1e6 * per_request, 1e6 * per_token, busy)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench overhead``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    server = parser.add_argument_group("server")
    server.add_argument("--base-url", metavar="URL", help="a running server on this machine; needs --pid")
    server.add_argument("--pid", type=positive_int, help="process id of its `skiff serve`")
    server.add_argument(
        "--serve-flags",
        default="--model demo://",
        metavar="FLAGS",
        help="flags of the server that is started otherwise (default: %(default)s)",
    )
    load = parser.add_argument_group("load")
    load.add_argument("--backend", choices=sorted(PATHS), default=CHAT, help="default: %(default)s")
    load.add_argument(
        "--num-prompts",
        type=positive_int,
        default=500,
        metavar="N",
        help="requests of each load (default: %(default)s)",
    )
    load.add_argument(
        "--max-concurrency",
        type=positive_int,
        default=32,
        metavar="N",
        help="maximum number of requests in flight (default: %(default)s)",
    )
    load.add_argument(
        "--input-len",
        type=LengthRange.parse,
        default=LengthRange(32, 32),
        metavar="LEN",
        help="prompt length in tokens, or LOW:HIGH (default: %(default)s)",
    )
    load.add_argument(
        "--output-len",
        type=positive_int,
        default=64,
        metavar="N",
        help="output length of the second load (default: %(default)s)",
    )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures as JSON")
    add_renamed_flags(parser, RENAMED_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write the figures, and return the exit code."""
    log.configure("bench", "info")
    if (arguments.base_url is None) != (arguments.pid is None):
        raise ConfigError("--base-url and --pid belong together: give both, or neither")
    if arguments.output_len < 2:
        raise ConfigError("--output-len must be at least 2, because a load of one token is compared with it")
    with contextlib.ExitStack() as stack:
        url, pid = arguments.base_url, arguments.pid
        if url is None:
            server = stack.enter_context(LocalServer(shlex.split(arguments.serve_flags)))
            url, pid = server.url, server.pid
        figures = _measure(arguments, url, pid)
    _show(figures)
    if arguments.output_json is not None:
        write_json(arguments.output_json, figures)
    return EXIT_OK


def _measure(arguments: argparse.Namespace, url: str, pid: int) -> Figures:
    processes = find_service_processes(pid)
    load = OverheadLoad(
        url=url,
        model=fetch_served_model(url),
        backend=arguments.backend,
        count=arguments.num_prompts,
        max_concurrency=arguments.max_concurrency,
        inputs=arguments.input_len,
    )
    meter = CpuMeter(processes, load)
    short = meter.measure(output_tokens=1, seed=2)
    long = meter.measure(output_tokens=arguments.output_len, seed=3)
    by_name = compute_costs(short, long)
    frontend = [by_name[each.name] for each in processes if each.role in FRONTEND_ROLES]
    return {
        "benchmark": "overhead",
        "load": {**asdict(load), "output_len": arguments.output_len},
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "requests": short.requests + long.requests,
        "output_tokens": short.tokens + long.tokens,
        "seconds": short.seconds + long.seconds,
        "processes": {name: asdict(cost) for name, cost in by_name.items()},
        "frontend": asdict(_sum(frontend)),
    }


def _sum(parts: list[CpuCost]) -> CpuCost:
    return CpuCost(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))


def _show(figures: Figures) -> None:
    named = [*figures["processes"].items(), ("api + tokenizers + detokenizer", figures["frontend"])]
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
        f"at most {figures['load']['max_concurrency']} at a time"
    )
    console.print(make_table(("process", "CPU-us/request", "CPU-us/token", "busy"), rows))
