"""``skiff bench offline``: throughput of the engine without HTTP, in rounds of a synthetic workload."""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from skiff_runtime import log
from skiff_runtime.bench.flag_types import LengthRange, natural_float, natural_int, positive_int
from skiff_runtime.bench.offline.profile_breakdown import Breakdown, break_down, read_trace
from skiff_runtime.bench.offline.random_adapters import write_random_adapters
from skiff_runtime.bench.offline.roofline import (
    DevicePeaks,
    RooflineTime,
    compute_model_cost,
    estimate_roofline,
)
from skiff_runtime.bench.offline.rounds import Bench, Round, Workload, token_ids
from skiff_runtime.bench.offline.step_times import StepTimes
from skiff_runtime.bench.offline.throughput_report import collect_figures, show_results
from skiff_runtime.bench.report import write_json
from skiff_runtime.bench.workload import PrefixGroups, SampleRequest
from skiff_runtime.config import Config
from skiff_runtime.config.adapters import MAX_ADAPTERS, parse_adapters
from skiff_runtime.config.arguments import add_config_arguments, add_renamed_flags, build_config
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.errors import ConfigError, SkiffError
from skiff_runtime.layers.weight_format import Fp8Format, choose_weight_format
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.offline.llm import LLM
from skiff_runtime.offline.sampling_params import SamplingParams
from skiff_runtime.processes.resolve import resolve
from skiff_runtime.progress import ProgressBar

DESCRIPTION: Final = """\
Throughput of the engine without HTTP: all requests of a round arrive at once, as random
token ids of random lengths, and every output has its full length."""
EPILOG: Final = """\
Each round draws new prompts, so that no round hits prefixes that another has cached. The
first of several rounds is a warm-up: it is shown, but not counted.

The roofline is the least time that the workload could take at the device's peak rates of
copies and matrix products, which are measured first, in a process of their own.

With LoRA adapters, requests choose them in turn: those of --lora, and --lora-adapters with
random weights. --enable-lora without any shows what a service pays for adapters that no
request uses. The roofline is that of the model without adapters.

--dump-workload writes the requests of all rounds, so that another engine can run the same
ones. The seed determines them: the same flags give the same file.

examples:
  skiff bench offline --model hf://Qwen/Qwen3-0.6B --max-model-len 4096 --max-num-batched-tokens 16384
  skiff bench offline --model shape://qwen3-14b --load-format dummy --rounds 3
  skiff bench offline --model shape://llama-3.1-8b --load-format dummy --dataset-name generated-shared-prefix
  skiff bench offline --model shape://llama-3.1-8b --load-format dummy --lora-adapters 16 --max-loras 16
  skiff bench offline --num-prompts 16 --input-len 10:100 --output-len 10:100     on a CPU
"""
RANDOM: Final = "random"
SHARED_PREFIX: Final = "generated-shared-prefix"
SERVER_FIELDS: Final = ("host", "port", "tokenizer_worker_num", "max_request_bytes", "drain_timeout_seconds")
"""Fields of Config that concern only a server, and so are no flags of an offline benchmark."""
RENAMED_FLAGS: Final = {
    "--workload": f"--dataset-name {RANDOM}|{SHARED_PREFIX}",
    "--num-requests": "--num-prompts",
    "--prefix-groups": "--gsp-num-groups",
    "--prompts-per-group": "--gsp-prompts-per-group",
    "--prefix-len": "--gsp-system-prompt-len",
    "--output": "--output-json",
}
TRACE_SECONDS: Final = 120.0
PEAKS_SECONDS: Final = 180.0
_DEFAULT_LENGTHS: Final = {RANDOM: LengthRange(100, 1024), SHARED_PREFIX: LengthRange(128, 128)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench offline``, which include those of ``skiff serve``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_workload(parser.add_argument_group("Workload"))
    result = parser.add_argument_group("Result")
    result.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures as JSON")
    result.add_argument(
        "--dump-workload",
        type=Path,
        metavar="FILE",
        help="write the requests of each round as JSON (prompt_token_ids, output_tokens), before they run",
    )
    result.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="profile some steps of an additional round: a trace for chrome://tracing (.json or .json.gz), and a "
        "table of the time by kind of kernel",
    )
    result.add_argument(
        "--profile-steps",
        type=positive_int,
        default=32,
        metavar="N",
        help="number of steps to profile (default: %(default)s)",
    )
    result.add_argument(
        "--roofline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the device's peak rates first, and report the fraction of the roofline that is reached",
    )
    add_config_arguments(parser, skip=SERVER_FIELDS)
    add_renamed_flags(parser, RENAMED_FLAGS)


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--dataset-name",
        choices=(RANDOM, SHARED_PREFIX),
        default=RANDOM,
        help="random prompts, or groups of random prompts that share a prefix, in random order (default: %(default)s)",
    )
    group.add_argument(
        "--num-prompts",
        type=positive_int,
        default=256,
        metavar="N",
        help="random: requests of a round (default: %(default)s)",
    )
    for name, what in (("--input-len", "prompt"), ("--output-len", "output")):
        group.add_argument(
            name,
            type=LengthRange.parse,
            metavar="LEN",
            help=f"{what} length in tokens, or LOW:HIGH (default: {_DEFAULT_LENGTHS[RANDOM]}; "
            f"generated-shared-prefix: {_DEFAULT_LENGTHS[SHARED_PREFIX]})",
        )
    for name, default, text in (
        ("--gsp-num-groups", 64, "number of prefixes"),
        ("--gsp-prompts-per-group", 16, "prompts with the same prefix"),
        ("--gsp-system-prompt-len", 2048, "tokens of a prefix; --input-len more follow"),
    ):
        group.add_argument(
            name,
            type=positive_int,
            default=default,
            metavar="N",
            help=f"generated-shared-prefix: {text} (default: {default})",
        )
    group.add_argument(
        "--lora-adapters",
        type=natural_int,
        default=0,
        metavar="N",
        help="number of LoRA adapters with random weights; beyond --max-loras, the files of earlier ones are used again "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--lora-rank", type=positive_int, metavar="R", help="their rank (default: --max-lora-rank)"
    )
    group.add_argument(
        "--rounds",
        type=positive_int,
        default=3,
        metavar="N",
        help="number of rounds; before more than one, all CUDA graphs are captured (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=natural_float,
        default=0.6,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=natural_int,
        default=0,
        metavar="N",
        help="seed of prompts, lengths and sampling (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write the figures, and return the exit code."""
    config = build_config(arguments)
    if arguments.rounds > 1:
        # One round shows a start; several show the throughput, in which no graph should be captured.
        config = replace(config, disable_deferred_graph_capture=True)
    log.configure("bench", config.log_level)
    resolved, model = resolve(config)
    workload = _make_workload(arguments, resolved, model)
    rounds_of_samples = [workload.draw_round() for _ in range(arguments.rounds)]
    if arguments.dump_workload is not None:
        _dump_workload(arguments.dump_workload, rounds_of_samples)
    peaks = _measure_peaks(resolved, model, arguments)
    with _with_adapters(config, model, arguments) as config:
        resolved = replace(resolved, lora=config.lora, enable_lora=resolved.enable_lora or bool(config.lora))
        return _run_bench(config, Bench(resolved, model, arguments, workload, peaks), rounds_of_samples)


def _run_bench(config: Config, bench: Bench, rounds_of_samples: list[list[SampleRequest]]) -> int:
    arguments = bench.arguments
    with LLM(**asdict(config), on_phase=_log_phases()) as llm:
        rounds = [
            _run_round(llm, bench, samples, f"round {number}")
            for number, samples in enumerate(rounds_of_samples, 1)
        ]
        breakdown = _profile(llm, bench) if arguments.profile is not None else None
    figures = collect_figures(bench, rounds, breakdown)
    show_results(rounds, figures, breakdown)
    if arguments.output_json is not None:
        write_json(arguments.output_json, figures)
    return EXIT_OK


@contextmanager
def _with_adapters(config: Config, model: ModelConfig, arguments: argparse.Namespace) -> Iterator[Config]:
    """Yield the configuration with the adapters of ``--lora-adapters``, whose files exist until the end.

    Raises:
        ConfigError: There are too many of them, or their rank is too large.
    """
    count, rank = arguments.lora_adapters, arguments.lora_rank or config.max_lora_rank
    if not count:
        yield config
        return
    if count > MAX_ADAPTERS:
        raise ConfigError(f"--lora-adapters {count}: at most {MAX_ADAPTERS} adapters can be loaded")
    if rank > config.max_lora_rank:
        raise ConfigError(f"--lora-rank {rank} exceeds --max-lora-rank ({config.max_lora_rank})")
    with tempfile.TemporaryDirectory(prefix="skiff-bench-lora-") as directory:
        distinct = min(count, config.max_loras)
        paths = write_random_adapters(Path(directory), model, count=distinct, rank=rank, seed=arguments.seed)
        named = (f"random-{number}={paths[number % distinct]}" for number in range(count))
        yield replace(config, lora=(*config.lora, *named), enable_lora=True)


def _make_workload(arguments: argparse.Namespace, config: Config, model: ModelConfig) -> Workload:
    """Return the workload of the flags. Raises ConfigError if its longest request exceeds the context."""
    default, groups = _DEFAULT_LENGTHS[arguments.dataset_name], None
    inputs, outputs = arguments.input_len or default, arguments.output_len or default
    if arguments.dataset_name == SHARED_PREFIX:
        groups = PrefixGroups(
            arguments.gsp_num_groups, arguments.gsp_prompts_per_group, arguments.gsp_system_prompt_len
        )
    prefix = 0 if groups is None else groups.tokens
    limit = config.max_model_len
    if limit is not None and prefix + inputs.high + outputs.high > limit:
        flags = f"--gsp-system-prompt-len {prefix}, " if prefix else ""
        raise ConfigError(
            f"{flags}--input-len {inputs} and --output-len {outputs} together exceed {limit} tokens, "
            "the maximum length of a request here; lower them"
        )
    generator = np.random.default_rng(arguments.seed)
    return Workload((inputs, outputs), groups, arguments.num_prompts, model.vocab_size, generator)


def _dump_workload(path: Path, rounds: list[list[SampleRequest]]) -> None:
    """Write all rounds as JSON. Raises ConfigError if the file cannot be written."""
    content = {
        "rounds": [
            [{"prompt_token_ids": each.prompt, "output_tokens": each.output_tokens} for each in samples]
            for samples in rounds
        ]
    }
    try:
        path.write_bytes(msgspec.json.encode(content) + b"\n")
    except OSError as error:
        raise ConfigError(f"--dump-workload {path}: {error.strerror}") from error


def _measure_peaks(config: Config, model: ModelConfig, arguments: argparse.Namespace) -> DevicePeaks | None:
    if not arguments.roofline:
        return None
    weight_format = choose_weight_format(config.quantization, model.weight_format)
    dtype = "fp8" if isinstance(weight_format, Fp8Format) else config.dtype
    return measure_device_peaks(config.device, dtype, config.cpu_threads)


def measure_device_peaks(device: str, dtype: str, threads: int | None) -> DevicePeaks:
    """Measure a device's peak rates in a child process. ``dtype`` is ``fp8`` or torch's name."""
    command = [sys.executable, "-m", "skiff_runtime.bench.offline.device_peaks"]
    command += [device, dtype, str(threads or 0)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PEAKS_SECONDS, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        last_line = (error.stderr or b"").decode(errors="replace").strip().splitlines()[-1:]
        raise SkiffError(
            f"the peak rates of {device} could not be measured: {''.join(last_line) or error}"
        ) from None
    return msgspec.json.decode(done.stdout, type=DevicePeaks)


def _log_phases() -> Callable[[str, str], None]:
    """Return a function that logs each start phase of each process once, with the time since the start."""
    last: dict[str, str] = {}
    started = time.perf_counter()

    def log_phase(process: str, phase: str) -> None:
        if last.get(process) != phase:
            last[process] = phase
            seconds = f"{time.perf_counter() - started:.2f}"
            log.event("bench_phase_started", process=process, phase=phase, seconds=seconds)

    return log_phase


def _run_round(
    llm: LLM,
    bench: Bench,
    samples: list[SampleRequest],
    title: str,
    on_half: Callable[[], None] | None = None,
) -> Round:
    """Run one round. ``on_half`` is called once half of the tokens are generated."""
    expected, done = sum(each.output_tokens for each in samples), 0
    steps = StepTimes()
    llm.watch_steps(steps.record)
    with ProgressBar(title, expected) as counter:

        def count_tokens(count: int) -> None:
            nonlocal done, on_half
            done += count
            counter.advance(done=count, tokens=count)
            if on_half is not None and 2 * done >= expected:
                on_half()
                on_half = None

        lora = _choose_adapters(bench.config, len(samples))
        started = time.perf_counter()
        prompts = [token_ids(each) for each in samples]
        sampling_params = _make_sampling_params(samples, bench.arguments)
        completions = llm.generate(prompts, sampling_params, lora=lora, on_progress=count_tokens)
        seconds = time.perf_counter() - started
    output = sum(len(each.token_ids) for each in completions)
    if output != expected:
        raise SkiffError(f"{title}: {output} tokens were generated instead of {expected}")
    roofline = _estimate_roofline(bench, samples)
    return Round(seconds, sum(each.prompt_tokens for each in completions), output, steps, roofline)


def _choose_adapters(config: Config, count: int) -> list[str] | None:
    """Return the adapter of each of ``count`` requests, which choose them in turn; None without adapters."""
    names = [each.name for each in parse_adapters(config.lora)]
    return [names[number % len(names)] for number in range(count)] if names else None


def _estimate_roofline(bench: Bench, samples: list[SampleRequest]) -> RooflineTime | None:
    if bench.peaks is None:
        return None
    return estimate_roofline(
        compute_model_cost(bench.config, bench.model),
        bench.workload.shapes_of(samples),
        max_running=bench.config.running_limit,
        peaks=bench.peaks,
    )


def _make_sampling_params(
    samples: list[SampleRequest], arguments: argparse.Namespace
) -> list[SamplingParams]:
    return [
        SamplingParams(
            max_tokens=each.output_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed + index,
            ignore_eos=True,
        )
        for index, each in enumerate(samples)
    ]


def _profile(llm: LLM, bench: Bench) -> Breakdown:
    """Profile steps in the middle of an additional round, and summarize the trace."""
    path: Path = bench.arguments.profile
    path.unlink(missing_ok=True)

    def start() -> None:
        llm.profile(path, steps=bench.arguments.profile_steps)

    _run_round(llm, bench, bench.workload.draw_round(), "profiled round", start)
    deadline = time.monotonic() + TRACE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise SkiffError(f"no profile was written to {path}; see the log above")
        time.sleep(0.1)
    events = read_trace(path)
    if not events:
        raise SkiffError("the round was over before a step could be profiled; request longer outputs")
    return break_down(events)
