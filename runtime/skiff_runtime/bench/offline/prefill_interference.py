"""``skiff bench prefill-interference``: inter-token latency of decoding requests while a long prompt is computed."""

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np
from rich.console import Console

from skiff_runtime import log
from skiff_runtime.bench.flag_types import natural_int, positive_int
from skiff_runtime.bench.report import make_table, write_json
from skiff_runtime.config import Config
from skiff_runtime.config.arguments import add_config_arguments, add_renamed_flags, build_config
from skiff_runtime.contract import EXIT_FAILURE, EXIT_OK
from skiff_runtime.errors import ConfigError, SkiffError
from skiff_runtime.kernels import kernel_cache
from skiff_runtime.messages import (
    NO_TOKEN,
    AbortRequest,
    GenerateRequest,
    SamplingSpec,
    TextOptions,
    TokenBatch,
    Wire,
)
from skiff_runtime.processes.child_process import die_with_parent
from skiff_runtime.processes.launch import Launch
from skiff_runtime.processes.resolve import resolve
from skiff_runtime.scheduler.channel import Channel, SchedulerInput
from skiff_runtime.scheduler.scheduler import Scheduler
from skiff_runtime.worker.step_watchdog import StepWatchdog

if TYPE_CHECKING:
    from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
    from skiff_runtime.engine.engine import Engine

DESCRIPTION: Final = """\
Inter-token latency of decoding requests while a long prompt is computed beside them:
scheduler and engine in one process for each rank, once for each bound of --mixed-prefill-tokens."""
EPILOG: Final = """\
Baseline is the median inter-token latency before the prompt arrives. Median and largest
are those from its arrival until its first token; the ratio is that of largest to baseline.

examples:
  skiff bench prefill-interference --model shape://llama-3.1-8b --load-format dummy --max-num-batched-tokens 8192
  skiff bench prefill-interference --batch-size 8 --context-len 50 --input-len 1000 --chunk-sizes all,128,32     on a CPU
"""
UNBOUNDED: Final = 0
"""Chunk size that only --max-num-batched-tokens bounds; ``all`` on the command line."""
TEMPERATURE: Final = 0.6
MAX_TURNS: Final = 1_000_000
END_SECONDS: Final = 60.0
"""Time limit for the other ranks to end after the first one."""
FAILURE_GRACE_SECONDS: Final = 3.0
_LOAD_FILE: Final = "load.json"
RENAMED_FLAGS: Final = {
    "--streams": "--batch-size",
    "--context": "--context-len",
    "--prompt-len": "--input-len",
    "--quiet-steps": "--baseline-steps",
    "--chunks": "--chunk-sizes",
    "--output": "--output-json",
}
_UNUSED_FIELDS: Final = (
    "host",
    "port",
    "tokenizer_worker_num",
    "max_request_bytes",
    "drain_timeout_seconds",
    "max_running_requests",
    "mixed_prefill_tokens",
)


@dataclass(frozen=True, slots=True)
class Load:
    """The workload: see the flags of the same names."""

    batch_size: int
    context_len: int
    input_len: int
    baseline_steps: int
    chunk_sizes: tuple[int, ...]
    seed: int


class TokenTimes(Channel):
    """Channel of the scheduler that delivers requests at once, and records the arrival time of each token."""

    def __init__(self) -> None:
        self.arriving: list[SchedulerInput] = []
        self.times: dict[int, list[float]] = {}

    def receive(self, *, wait: bool, checksum: int) -> list[SchedulerInput]:
        """Return the items that were added to ``arriving`` since the last call. Never blocks."""
        items, self.arriving = self.arriving, []
        return items

    def send(self, batch: TokenBatch) -> None:
        """Record the time of each token of a batch, by uid."""
        now = perf_counter()
        if batch.failed:
            raise SkiffError(f"a request failed: {batch.failed[0].message}")
        uids, tokens = np.frombuffer(batch.uids, Wire.UID), np.frombuffer(batch.tokens, Wire.TOKEN)
        for uid in uids[tokens != NO_TOKEN].tolist():
            self.times.setdefault(uid, []).append(now)


@dataclass(frozen=True, slots=True)
class InterferenceResult:
    """Latencies in milliseconds for one bound on chunks. ``steps`` is the number of steps that computed the prompt."""

    mixed_prefill_tokens: int | None
    steps: int
    baseline_ms: float
    median_ms: float
    largest_ms: float
    ttft_ms: float

    @property
    def ratio(self) -> float:
        """The largest inter-token latency in multiples of the baseline."""
        return self.largest_ms / self.baseline_ms


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags, which include those of the engine."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    group = parser.add_argument_group("Workload")
    for name, default, text in (
        ("--batch-size", 64, "decoding requests"),
        ("--context-len", 500, "prompt length of each of them, in tokens"),
        ("--input-len", 32768, "length of the long prompt, in tokens"),
        ("--baseline-steps", 100, "steps that are measured before it arrives"),
    ):
        group.add_argument(
            name, type=positive_int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--chunk-sizes",
        type=_parse_chunk_sizes,
        default=_parse_chunk_sizes("all,2048,1024,512,256"),
        metavar="N,...",
        help="bounds on the prompt tokens in a step that also decodes; all: what --max-num-batched-tokens leaves "
        "(default: all,2048,1024,512,256)",
    )
    group.add_argument("--seed", type=natural_int, default=0, metavar="N", help="default: %(default)s")
    group.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures as JSON")
    add_config_arguments(parser, skip=_UNUSED_FIELDS)
    add_renamed_flags(parser, RENAMED_FLAGS)


def _parse_chunk_sizes(text: str) -> tuple[int, ...]:
    """Parse numbers of tokens, or ``all``, separated by commas."""
    return tuple(UNBOUNDED if each == "all" else positive_int(each) for each in text.split(","))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write the figures, and return the exit code."""
    config, model = resolve(build_config(arguments, max_running_requests=arguments.batch_size + 1))
    log.configure("bench", config.log_level)
    load = Load(**{name: getattr(arguments, name) for name in Load.__dataclass_fields__})
    _check(config, load)
    with tempfile.TemporaryDirectory() as scratch:
        launch = Launch(config, model, Path(scratch))
        with _OtherRanks(launch, load):
            results = _measure_rank(launch, load, rank=0)
    _show(results)
    if arguments.output_json is not None:
        write_json(arguments.output_json, _collect_figures(results, config, load))
    return EXIT_OK


class _OtherRanks:
    """The ranks besides the first, each in a process that runs the same workload in lockstep.

    Nothing has to be sent to them: when a request arrives depends on the number of tokens so far, never on time.
    """

    def __init__(self, launch: Launch, load: Load) -> None:
        self._launch = launch
        self._load = load
        self._processes: list[subprocess.Popen[bytes]] = []
        self._over = threading.Event()

    def __enter__(self) -> Self:
        run_dir = self._launch.run_dir
        self._launch.write()
        (run_dir / _LOAD_FILE).write_bytes(msgspec.json.encode(self._load))
        for rank in range(1, self._launch.config.tp_size):
            command = [sys.executable, "-m", __name__, str(rank), str(run_dir), str(os.getpid())]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            self._processes.append(process)
            threading.Thread(target=self._watch, args=(rank, process), daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        codes = [self._end(process, kill=error is not None) for process in self._processes]
        failed = [rank for rank, code in enumerate(codes, 1) if code]
        if error is None and failed:
            raise SkiffError(f"rank {failed[0]} ended with code {codes[failed[0] - 1]}; see its log above")

    @staticmethod
    def _end(process: "subprocess.Popen[bytes]", *, kill: bool) -> int:
        """Wait for a process, and kill it at once or after END_SECONDS; return its exit code."""
        if not kill:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(END_SECONDS)
        process.kill()
        return process.wait()

    def _watch(self, rank: int, process: "subprocess.Popen[bytes]") -> None:
        """End this process if the rank's fails: its main thread may be in a collective that can never end."""
        code = process.wait()
        # What is wrong with one rank is often wrong with all: then this process ends by itself, with its own error.
        if code and not self._over.wait(FAILURE_GRACE_SECONDS):
            log.error("rank_failed", rank=rank, code=code)
            shutil.rmtree(self._launch.run_dir, ignore_errors=True)
            os._exit(EXIT_FAILURE)


def _measure_rank(launch: Launch, load: Load, *, rank: int) -> list[InterferenceResult]:
    """Run the whole benchmark on one rank; all ranks do the same, at the same time."""
    # Imported here, since they import torch, for which `skiff complete` does not wait.
    from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
    from skiff_runtime.engine.engine import Engine

    config, model = launch.config, launch.model
    if config.device == "cuda" and config.kernel_cache_dir is not None:
        kernel_cache.activate(Path(config.kernel_cache_dir), launch.run_dir)
    with TensorParallelGroup.start(
        tp_rank=rank,
        tp_size=config.tp_size,
        device=config.device,
        run_dir=launch.run_dir,
        timeout_seconds=config.startup_timeout_seconds,
        all_reduce=config.all_reduce,
    ) as group:
        engine = Engine(config, model, group, on_phase=lambda phase, progress: None)
        engine.warmup()
        bench = _InterferenceBench(engine, group, launch, load)
        # A run that is not counted: what happens once, such as the compilation of a kernel, happens in it.
        bench.measure(UNBOUNDED)
        results = [bench.measure(chunk_size) for chunk_size in load.chunk_sizes]
        engine.close()
    return results


def _run_other_rank(arguments: Sequence[str]) -> int:
    """Run one of the other ranks; the main function of its process."""
    rank, run_dir = int(arguments[0]), Path(arguments[1])
    die_with_parent(int(arguments[2]))
    launch = Launch.read(run_dir)
    log.configure(f"rank{rank}", launch.config.log_level)
    load = msgspec.json.decode((run_dir / _LOAD_FILE).read_bytes(), type=Load)
    try:
        _measure_rank(launch, load, rank=rank)
    except SkiffError as error:
        log.error("process_failed", error=type(error).__name__, message=str(error))
        os._exit(EXIT_FAILURE)
    return EXIT_OK


def _check(config: Config, load: Load) -> None:
    assert config.max_model_len is not None
    longest = max(load.input_len + 1, load.context_len + _count_outputs(config, load))
    if longest > config.max_model_len:
        raise ConfigError(f"requests of {longest} tokens exceed --max-model-len ({config.max_model_len})")


def _count_outputs(config: Config, load: Load) -> int:
    """Return an upper bound on the tokens of a decoding request: one for each step of the run."""
    least = min(each or config.max_num_batched_tokens for each in load.chunk_sizes)
    chunk = max(1, min(least, config.max_num_batched_tokens - load.batch_size))
    prompts = load.batch_size * load.context_len + load.input_len
    return int(load.baseline_steps + prompts // chunk + load.batch_size + 16)


class _InterferenceBench:
    """Runs of the workload over one engine, the first of ``group`` or another."""

    def __init__(self, engine: "Engine", group: "TensorParallelGroup", launch: Launch, load: Load) -> None:
        assert launch.config.watchdog_timeout is not None
        self._engine = StepWatchdog(engine, timeout_seconds=launch.config.watchdog_timeout, beat=lambda: None)
        self._num_pages = engine.num_pages
        self._group = group
        self._config = launch.config
        self._vocab_size = launch.model.vocab_size
        self._load = load

    def measure(self, chunk_size: int) -> InterferenceResult:
        """Decode a batch, then add the long prompt; its first token ends the measurement."""
        load, channel = self._load, TokenTimes()
        scheduler = Scheduler(
            replace(self._config, mixed_prefill_tokens=chunk_size or None),
            eos_token_ids=(),
            num_pages=self._num_pages,
            engine=self._engine,
            channel=channel,
        )
        generator = np.random.default_rng(load.seed)
        decoding, long = range(load.batch_size), load.batch_size
        outputs = _count_outputs(self._config, load)
        for uid in decoding:
            channel.arriving.append(self._make_request(uid, load.context_len, outputs, generator))
        _turn_until(scheduler, lambda: len(channel.times) == len(decoding))
        # Number of tokens of the request that started first, when the last one has its first token: from here on, the
        # batch is complete.
        settled = max(map(len, channel.times.values()))
        _turn_until(scheduler, lambda: len(channel.times[0]) >= settled + load.baseline_steps)
        arrived = perf_counter()
        channel.arriving.append(self._make_request(long, load.input_len, 1, generator))
        _turn_until(scheduler, lambda: long in channel.times)
        first_token = channel.times[long][0]
        channel.arriving += [AbortRequest(uid=uid) for uid in decoding]
        _turn_until(scheduler, lambda: scheduler.is_idle and not channel.arriving)
        if self._group.all_reduce_min(scheduler.checksum) != scheduler.checksum:
            raise SkiffError(f"rank {self._group.tp_rank} planned other steps than another rank")
        baseline = _latencies(channel, decoding, (channel.times[0][settled - 1], arrived))
        disturbed = _latencies(channel, decoding, (arrived, first_token))
        return InterferenceResult(
            mixed_prefill_tokens=chunk_size or None,
            steps=len(disturbed) // len(decoding),
            baseline_ms=statistics.median(baseline),
            median_ms=statistics.median(disturbed),
            largest_ms=max(disturbed),
            ttft_ms=1e3 * (first_token - arrived),
        )

    def _make_request(
        self, uid: int, prompt: int, output: int, generator: np.random.Generator
    ) -> GenerateRequest:
        ids = generator.integers(0, self._vocab_size, prompt).astype(Wire.TOKEN).tobytes()
        sampling = SamplingSpec(max_tokens=output, seed=uid, temperature=TEMPERATURE, ignore_eos=True)
        return GenerateRequest(uid, ids, sampling, TextOptions())


def _turn_until(scheduler: Scheduler, is_done: Callable[[], bool]) -> None:
    for _ in range(MAX_TURNS):
        if is_done():
            return
        scheduler.turn()
    raise SkiffError(f"the requests did not end within {MAX_TURNS} steps")


def _latencies(channel: TokenTimes, uids: Sequence[int], span: tuple[float, float]) -> list[float]:
    """Return the inter-token latencies in milliseconds whose second token arrived within ``span``."""
    found: list[float] = []
    for uid in uids:
        times = np.array(channel.times[uid])
        ends = times[1:]
        found += (1e3 * np.diff(times)[(ends > span[0]) & (ends <= span[1])]).tolist()
    return found


def _show(results: Sequence[InterferenceResult]) -> None:
    heads = ("chunk size", "steps", "baseline ms", "median ms", "largest ms", "ratio", "TTFT ms")
    rows = [
        (
            str(each.mixed_prefill_tokens or "all"),
            str(each.steps),
            f"{each.baseline_ms:.2f}",
            f"{each.median_ms:.2f}",
            f"{each.largest_ms:.2f}",
            f"{each.ratio:.2f}",
            f"{each.ttft_ms:,.0f}",
        )
        for each in results
    ]
    Console(highlight=False).print(make_table(heads, rows))


def _collect_figures(results: Sequence[InterferenceResult], config: Config, load: Load) -> dict[str, Any]:
    return {
        "benchmark": "prefill-interference",
        "model": config.model,
        "tp_size": config.tp_size,
        "batch_size": load.batch_size,
        "context_len": load.context_len,
        "input_len": load.input_len,
        "config": config.public_fields(),
        "runs": [{**asdict(each), "ratio": each.ratio} for each in results],
    }


if __name__ == "__main__":
    sys.exit(_run_other_rank(sys.argv[1:]))
