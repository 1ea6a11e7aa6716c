"""``skiff bench gaps``: how long those that decode wait for their next token while a long prompt is computed."""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
from rich.console import Console

from skiff_runtime import log
from skiff_runtime.bench import report
from skiff_runtime.bench.gaps_options import OFF, add_arguments
from skiff_runtime.config import Config
from skiff_runtime.config.arguments import build_config
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.engine import Engine
from skiff_runtime.errors import ConfigError, SkiffError
from skiff_runtime.kernels import kernel_cache as cache
from skiff_runtime.messages import (
    NO_TOKEN,
    AbortRequest,
    GenerateRequest,
    SamplingSpec,
    TextOptions,
    TokenBatch,
    Wire,
)
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.processes.resolve import resolve
from skiff_runtime.scheduler.channel import Channel, SchedulerInput
from skiff_runtime.scheduler.scheduler import Scheduler

TEMPERATURE: Final = 0.6
MAX_TURNS: Final = 1_000_000
__all__ = ["add_arguments", "run"]


class Clients(Channel):
    """Everybody who asked for something: notes when each of their tokens came."""

    def __init__(self) -> None:
        self.arriving: list[SchedulerInput] = []
        self.times: dict[int, list[float]] = {}

    def receive(self, *, wait: bool, checksum: int) -> list[SchedulerInput]:
        """What was put into ``arriving`` since the last turn; never blocks."""
        items, self.arriving = self.arriving, []
        return items

    def send(self, batch: TokenBatch) -> None:
        now = perf_counter()
        if batch.failed:
            raise SkiffError(f"a request failed: {batch.failed[0].message}")
        uids, tokens = np.frombuffer(batch.uids, Wire.UID), np.frombuffer(batch.tokens, Wire.TOKEN)
        for uid in uids[tokens != NO_TOKEN].tolist():
            self.times.setdefault(uid, []).append(now)


@dataclass(frozen=True, slots=True)
class Result:
    """Of one bound. ``steps`` computed the prompt; times in milliseconds, ``quiet_ms`` of the time before it came."""

    mixed_prefill_tokens: int | None
    steps: int
    quiet_ms: float
    median_ms: float
    largest_ms: float
    first_token_ms: float

    @property
    def ratio(self) -> float:
        """The largest gap, in quiet gaps."""
        return self.largest_ms / self.quiet_ms


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and write the figures; the exit code."""
    config, model = resolve(build_config(arguments, max_running_requests=arguments.streams + 1))
    log.configure("bench", config.log_level)
    _check(config, arguments)
    with tempfile.TemporaryDirectory() as scratch:
        if config.device == "cuda" and config.kernel_cache_dir is not None:
            cache.activate(Path(config.kernel_cache_dir), Path(scratch))
        group = TensorParallelGroup.start(tp_rank=0, tp_size=1, device=config.device, run_dir=Path(scratch))
        engine = Engine(config, model, group, on_phase=lambda phase, progress: None)
        engine.warmup()
        _measure(engine, config, model, arguments, OFF)  # what happens for the first time happens here
        results = [_measure(engine, config, model, arguments, each) for each in arguments.chunks]
        engine.close()
    _show(results)
    if arguments.output is not None:
        report.write(arguments.output, _figures(results, config, arguments))
    return EXIT_OK


def _check(config: Config, arguments: argparse.Namespace) -> None:
    if config.tp_size != 1:
        raise ConfigError("bench gaps measures one rank; leave out --tp")
    assert config.max_model_len is not None
    longest = max(arguments.prompt_len + 1, arguments.context + _outputs(config, arguments))
    if longest > config.max_model_len:
        raise ConfigError(f"requests of {longest} tokens exceed --max-model-len ({config.max_model_len})")


def _outputs(config: Config, arguments: argparse.Namespace) -> int:
    """Most tokens that a stream may need: one in each step that computes prompts, its own excepted, and the quiet ones."""
    least = min(each or config.max_num_batched_tokens for each in arguments.chunks)
    chunk = max(1, min(least, config.max_num_batched_tokens - arguments.streams))
    prompts = arguments.streams * arguments.context + arguments.prompt_len
    return int(arguments.quiet_steps + prompts // chunk + arguments.streams + 16)


def _measure(
    engine: Engine, config: Config, model: ModelConfig, arguments: argparse.Namespace, chunk: int
) -> Result:
    """Streams decode, a prompt arrives, and its first token ends the measurement."""
    clients, streams = Clients(), range(arguments.streams)
    config = replace(config, mixed_prefill_tokens=chunk or None)
    scheduler = Scheduler(
        config, eos_token_ids=(), num_pages=engine.num_pages, engine=engine, channel=clients
    )
    generator = np.random.default_rng(arguments.seed)
    outputs = _outputs(config, arguments)

    def ask(uid: int, length: int, count: int) -> None:
        ids = generator.integers(0, model.vocab_size, length).astype(Wire.TOKEN).tobytes()
        sampling = SamplingSpec(max_tokens=count, seed=uid, temperature=TEMPERATURE, ignore_eos=True)
        clients.arriving.append(GenerateRequest(uid, ids, sampling, TextOptions()))

    for uid in streams:
        ask(uid, arguments.context, outputs)
    _turn_until(scheduler, lambda: len(clients.times) == len(streams))
    settled = max(map(len, clients.times.values()))
    _turn_until(scheduler, lambda: len(clients.times[0]) >= settled + arguments.quiet_steps)
    arrived, late = perf_counter(), len(streams)
    ask(late, arguments.prompt_len, 1)
    _turn_until(scheduler, lambda: late in clients.times)
    first = clients.times[late][0]
    clients.arriving += [AbortRequest(uid=uid) for uid in streams]
    _turn_until(scheduler, lambda: scheduler.is_idle and not clients.arriving)
    quiet = _gaps(clients, streams, (clients.times[0][settled - 1], arrived))
    held = _gaps(clients, streams, (arrived, first))
    return Result(
        mixed_prefill_tokens=chunk or None,
        steps=len(held) // len(streams),
        quiet_ms=statistics.median(quiet),
        median_ms=statistics.median(held),
        largest_ms=max(held),
        first_token_ms=1e3 * (first - arrived),
    )


def _turn_until(scheduler: Scheduler, done: Callable[[], bool]) -> None:
    for _ in range(MAX_TURNS):
        if done():
            return
        scheduler.turn()
    raise SkiffError("the streams came to no end")


def _gaps(clients: Clients, streams: Sequence[int], span: tuple[float, float]) -> list[float]:
    """Milliseconds between two tokens of a stream, of which the second came within ``span``."""
    found: list[float] = []
    for uid in streams:
        times = np.array(clients.times[uid])
        ends = times[1:]
        found += (1e3 * np.diff(times)[(ends > span[0]) & (ends <= span[1])]).tolist()
    return found


def _show(results: Sequence[Result]) -> None:
    heads = (
        "prompt tokens beside decoding",
        "steps",
        "quiet ms",
        "median ms",
        "largest ms",
        "ratio",
        "TTFT ms",
    )
    rows = [
        (
            str(each.mixed_prefill_tokens or "all"),
            str(each.steps),
            f"{each.quiet_ms:.2f}",
            f"{each.median_ms:.2f}",
            f"{each.largest_ms:.2f}",
            f"{each.ratio:.2f}",
            f"{each.first_token_ms:,.0f}",
        )
        for each in results
    ]
    Console(highlight=False).print(report.table(heads, rows))


def _figures(results: Sequence[Result], config: Config, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "benchmark": "gaps",
        "model": config.model,
        "streams": arguments.streams,
        "context": arguments.context,
        "prompt_len": arguments.prompt_len,
        "config": config.public_fields(),
        "runs": [{**asdict(each), "ratio": each.ratio} for each in results],
    }
