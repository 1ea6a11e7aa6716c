"""Flags, loads and report of ``skiff bench path``."""

import argparse
import asyncio
import os
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, get_args

import numpy as np
import psutil
import uvloop
from rich.console import Console
from tokenizers import Tokenizer

from skiff_runtime import log
from skiff_runtime.bench.cpu_time import cpu_seconds
from skiff_runtime.bench.flag_types import natural_int, positive_float, positive_int
from skiff_runtime.bench.path.frontend_processes import FrontendProcesses
from skiff_runtime.bench.path.load_client import TokenStream, encode_request, send_all
from skiff_runtime.bench.path.scheduler_steps import measure_scheduler_steps
from skiff_runtime.bench.report import Figures, make_table, summarize_latencies, write_json
from skiff_runtime.config import AUTO, Config, TokenizerBackend
from skiff_runtime.config.arguments import add_renamed_flags
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.processes.resolve import resolve

DESCRIPTION: Final = """\
Cost of the serving path without the engine: the real API, tokenizer and detokenizer processes,
and a stub in the scheduler's place that gives every running request one token per step."""
EPILOG: Final = """\
Figures: CPU microseconds of each process per request and per token, age of a token when the
client receives it, delay of the tokens of running streams while long prompts arrive, resident
memory; and the time of a decode step in the real scheduler over an engine that takes no time.

examples:
  skiff bench path
  skiff bench path --tokenizer-backend tokenizers
  skiff bench path --tokenizer-worker-num 0 --output-json path.json
"""
RENAMED_FLAGS: Final = {
    "--requests": "--num-prompts",
    "--streams": "--num-streams",
    "--long-prompts": "--num-long-prompts",
    "--tokenizers": "--tokenizer-worker-num",
    "--output": "--output-json",
}
IDLE_SECONDS: Final = 2.0
WARM_UP_REQUESTS: Final = 64
CONCURRENCY: Final = 16
"""Connections of the load of one-token requests."""
LONG_CONCURRENCY: Final = 2
STREAM_PROMPT_TOKENS: Final = 16
_TOKEN_TEXT: Final = " pod"
_WORDS: Final = [
    "pod",
    "node",
    "image",
    "model",
    "token",
    "cache",
    "page",
    "rank",
    "prefill",
    "decode",
    "cluster",
    "service",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PathLoads:
    """Sizes of the loads. ``step_seconds``: time between two tokens of a stream."""

    requests: int
    prompt_tokens: int
    streams: int
    stream_tokens: int
    long_prompts: int
    long_prompt_tokens: int
    step_seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench path``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    counts = (
        ("--num-prompts", 2000, "requests of one token"),
        ("--input-len", 200, "length of their prompts, in tokens"),
        ("--num-streams", 256, "streams at a time"),
        ("--output-len", 400, "tokens of a stream"),
        ("--num-long-prompts", 8, "long prompts that arrive beside the streams"),
        ("--long-input-len", 30_000, "length of a long prompt, in tokens"),
        ("--scheduler-steps", 500, "decode steps of the scheduler alone"),
    )
    parser.add_argument(
        "--model",
        default="demo://",
        help="model whose tokenizer and chat template are used (default: %(default)s)",
    )
    for name, default, text in counts:
        parser.add_argument(
            name, type=positive_int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--step-ms",
        type=positive_float,
        default=10.0,
        metavar="MS",
        help="duration of a step of the stub (default: %(default)s)",
    )
    parser.add_argument(
        "--tokenizer-worker-num",
        type=natural_int,
        default=1,
        metavar="N",
        help="number of tokenizer processes (default: %(default)s)",
    )
    parser.add_argument(
        "--tokenizer-backend",
        choices=get_args(TokenizerBackend),
        default=AUTO,
        help="library that encodes prompts (default: %(default)s: fastokens if it is installed and agrees with "
        "tokenizers)",
    )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures as JSON")
    add_renamed_flags(parser, RENAMED_FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write the figures, and return the exit code."""
    log.configure("bench", "warning")
    loads = PathLoads(
        requests=arguments.num_prompts,
        prompt_tokens=arguments.input_len,
        streams=arguments.num_streams,
        stream_tokens=arguments.output_len,
        long_prompts=arguments.num_long_prompts,
        long_prompt_tokens=arguments.long_input_len,
        step_seconds=arguments.step_ms / 1e3,
    )
    with FrontendProcesses(
        arguments.model,
        tokenizer_worker_num=arguments.tokenizer_worker_num,
        tokenizer_backend=arguments.tokenizer_backend,
        step_milliseconds=arguments.step_ms,
        token=find_text_token(arguments.model),
    ) as frontend:
        figures = PathBench(frontend, loads).run()
    figures["scheduler_us"] = measure_scheduler_steps(arguments.scheduler_steps)
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    figures = {"benchmark": "path", "machine": machine, **figures}
    _show(figures)
    if arguments.output_json is not None:
        write_json(arguments.output_json, figures)
    return EXIT_OK


def find_text_token(model: str) -> int:
    """Return a token of plain text, with which the stub answers."""
    path = resolve(Config(model=model))[1].tokenizer_path / "tokenizer.json"
    token: int = Tokenizer.from_file(str(path)).encode(_TOKEN_TEXT, add_special_tokens=False).ids[-1]
    return token


class PathBench:
    """Sends the loads to one set of running front-end processes."""

    def __init__(self, frontend: FrontendProcesses, loads: PathLoads) -> None:
        self._frontend = frontend
        self._loads = loads
        self._name = frontend.launch.config.served_model_name or ""
        self._tokenizer = Tokenizer.from_file(str(frontend.launch.model.tokenizer_path / "tokenizer.json"))
        self._random = random.Random(0)

    def run(self) -> Figures:
        """Run all loads, one after the other."""
        uvloop.run(self._send([self._make_request(8, 4)] * WARM_UP_REQUESTS, CONCURRENCY))
        idle = self._cpu_seconds(lambda: time.sleep(IDLE_SECONDS))
        figures = {
            "requests": self._measure_requests(idle),
            "streams": self._measure_streams(idle),
            "stall": self._measure_stalls(),
        }
        return {**figures, "rss_mib": self._rss()}

    def _measure_requests(self, idle: dict[str, float]) -> Figures:
        """Measure the cost of requests for one token each."""
        loads = self._loads
        requests = [self._make_request(loads.prompt_tokens, 1) for _ in range(loads.requests)]
        figures, _ = self._measure(requests, CONCURRENCY, idle, units=loads.requests)
        return figures

    def _measure_streams(self, idle: dict[str, float]) -> Figures:
        """Measure the cost of a token with many streams at a time, and the age of tokens at the client."""
        loads = self._loads
        requests = [
            self._make_request(STREAM_PROMPT_TOKENS, loads.stream_tokens) for _ in range(loads.streams)
        ]
        tokens = loads.streams * loads.stream_tokens
        figures, streams = self._measure(requests, loads.streams, idle, units=tokens)
        # The stub's steps begin at multiples of their duration, on the same clock.
        step = loads.step_seconds
        ages = [(moment % step) * 1e3 for each in streams for moment in each.arrivals[1:]]
        return {
            **figures,
            "tokens_per_second": tokens / figures["seconds"],
            "age_ms": summarize_latencies(ages),
        }

    def _measure_stalls(self) -> Figures:
        """Measure the delay of the tokens of streams while long prompts arrive: latencies beyond a step."""
        loads = self._loads
        streams = [
            self._make_request(STREAM_PROMPT_TOKENS, loads.stream_tokens) for _ in range(loads.streams)
        ]
        long = [self._make_request(loads.long_prompt_tokens, 1) for _ in range(loads.long_prompts)]

        async def send_both() -> list[TokenStream]:
            running = asyncio.create_task(self._send(streams, loads.streams))
            await asyncio.sleep(loads.step_seconds * loads.stream_tokens / 10)
            await self._send(long, LONG_CONCURRENCY)
            return await running

        latencies = np.concatenate([np.diff(each.arrivals) for each in uvloop.run(send_both())])
        late = np.maximum(0.0, latencies - loads.step_seconds) * 1e3
        return {"long_prompts": loads.long_prompts, "late_ms": summarize_latencies(late.tolist())}

    def _measure(
        self, requests: Sequence[bytes], concurrency: int, idle: dict[str, float], *, units: int
    ) -> tuple[Figures, list[TokenStream]]:
        """Send a load. Returns the CPU microseconds of each process per unit, without idle ones, and the streams."""
        streams: list[TokenStream] = []
        started = time.perf_counter()
        used = self._cpu_seconds(lambda: streams.extend(uvloop.run(self._send(requests, concurrency))))
        seconds = time.perf_counter() - started
        cost = {
            name: (value - idle[name] * seconds / IDLE_SECONDS) / units * 1e6 for name, value in used.items()
        }
        return {"count": units, "seconds": seconds, "us": cost, "us_together": sum(cost.values())}, streams

    def _cpu_seconds(self, work: Callable[[], object]) -> dict[str, float]:
        """Return the CPU time of each process during ``work``."""
        before = cpu_seconds(self._frontend.watched)
        work()
        after = cpu_seconds(self._frontend.watched)
        return {name: after[name] - before[name] for name in before}

    def _rss(self) -> dict[str, float]:
        """Return the resident memory of each process in MiB."""
        return {
            each.name: psutil.Process(each.handle.pid).memory_info().rss / 2**20
            for each in self._frontend.watched
        }

    async def _send(self, requests: Sequence[bytes], concurrency: int) -> list[TokenStream]:
        return await send_all(self._frontend.url, requests, concurrency=concurrency)

    def _make_request(self, prompt_tokens: int, tokens: int) -> bytes:
        return encode_request(self._frontend.url, self._name, self._draw_text(prompt_tokens), tokens=tokens)

    def _draw_text(self, tokens: int) -> str:
        """Draw words that are about ``tokens`` tokens together."""
        words = self._random.choices(_WORDS, k=tokens)
        ids = self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids
        return " ".join(words[: max(1, tokens * len(words) // len(ids))])


def _show(figures: Figures) -> None:
    requests, streams, rss = figures["requests"], figures["streams"], figures["rss_mib"]
    rows = [
        (name, f"{requests['us'][name]:,.0f}", f"{streams['us'][name]:,.2f}", f"{rss[name]:,.0f}")
        for name in rss
    ]
    total = (
        f"{requests['us_together']:,.0f}",
        f"{streams['us_together']:,.2f}",
        f"{sum(rss.values()):,.0f}",
    )
    console = Console(highlight=False)
    heads = ("process", "CPU-us/request", "CPU-us/token", "RSS MiB")
    console.print(make_table(heads, [*rows, ("total", *total)]))
    age, late = streams["age_ms"], figures["stall"]["late_ms"]
    console.print(
        f"{streams['tokens_per_second']:,.0f} tokens/s; age of a token at the client: {age['p50']:.2f} ms (p50), "
        f"{age['p99']:.2f} ms (p99)"
    )
    steps = ", ".join(f"{us:,.0f} at batch {batch}" for batch, us in figures["scheduler_us"].items())
    console.print(f"scheduler, CPU-us per decode step: {steps}")
    console.print(
        f"delay of a token beside long prompts: {late['p50']:.2f} ms (p50), {late['p99']:.2f} ms (p99)"
    )
