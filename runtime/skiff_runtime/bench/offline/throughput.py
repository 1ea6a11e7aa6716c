"""``skiff bench offline``: throughput of the engine without HTTP, by a workload that is also used elsewhere."""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Final, cast

import numpy as np

from skiff_runtime import log
from skiff_runtime.bench import offline_options, report
from skiff_runtime.bench.offline import throughput_report as offline_report
from skiff_runtime.bench.offline.profile_breakdown import Breakdown, break_down, read_trace
from skiff_runtime.bench.offline.roofline import Rates, floor, work_of
from skiff_runtime.bench.offline.step_times import StepTimes
from skiff_runtime.bench.offline_options import lengths, prefixes
from skiff_runtime.bench.offline_rounds import Bench, Round
from skiff_runtime.bench.rates import measure
from skiff_runtime.bench.workload import Sample
from skiff_runtime.config import Config
from skiff_runtime.config.arguments import build_config
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.errors import ConfigError, SkiffError
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.offline.llm import LLM
from skiff_runtime.offline.sampling_params import SamplingParams
from skiff_runtime.processes.resolve import resolve
from skiff_runtime.progress import ProgressBar

TRACE_SECONDS: Final = 120.0
add_arguments = offline_options.add_arguments


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and write the figures; the exit code."""
    config = build_config(arguments)
    log.configure("bench", config.log_level)
    resolved, model = _check(config, arguments)
    bench = Bench(
        resolved, model, arguments, np.random.default_rng(arguments.seed), _rates(resolved, arguments)
    )
    with LLM(**asdict(config), on_phase=_phases()) as llm:
        rounds = [_run_round(llm, bench, f"round {number + 1}") for number in range(arguments.rounds)]
        breakdown = _profile(llm, bench) if arguments.profile is not None else None
    figures = offline_report.figures(bench, rounds, breakdown)
    offline_report.show(rounds, figures, breakdown)
    if arguments.output is not None:
        report.write(arguments.output, figures)
    return EXIT_OK


def _check(config: Config, arguments: argparse.Namespace) -> tuple[Config, ModelConfig]:
    """What is served; ConfigError where a request could not fit."""
    resolved, model = resolve(config)
    inputs, outputs = lengths(arguments)
    plan, longest = prefixes(arguments), resolved.max_model_len
    shared = 0 if plan is None else plan.tokens
    if longest is not None and shared + inputs.high + outputs.high > longest:
        told = f"--prefix-len {shared}, " if shared else ""
        raise ConfigError(
            f"{told}--input-len {inputs} and --output-len {outputs} together exceed {longest} tokens, "
            "the most that a request may have here; lower them"
        )
    return resolved, model


def _rates(config: Config, arguments: argparse.Namespace) -> Rates | None:
    if not arguments.roofline:
        return None
    kind = "fp8" if config.quantization == "fp8" else config.dtype
    return measure(config.device, kind, config.cpu_threads)


def _phases() -> Callable[[str, str], None]:
    """Logs each start phase of each process once, with the time since the start."""
    last: dict[str, str] = {}
    started = time.perf_counter()

    def note(process: str, phase: str) -> None:
        if last.get(process) != phase:
            last[process] = phase
            seconds = f"{time.perf_counter() - started:.2f}"
            log.event("bench_phase_started", process=process, phase=phase, seconds=seconds)

    return note


def _run_round(llm: LLM, bench: Bench, title: str, on_half: Callable[[], None] | None = None) -> Round:
    """One round; ``on_half`` is called once half of the tokens have come."""
    samples, loads = bench.draw()
    wanted, done = sum(each.output_tokens for each in samples), 0
    steps = StepTimes()
    llm.watch_steps(steps.note)
    with ProgressBar(title, wanted) as counter:

        def note(count: int) -> None:
            nonlocal done, on_half
            done += count
            counter.advance(done=count, tokens=count)
            if on_half is not None and 2 * done >= wanted:
                on_half()
                on_half = None

        started = time.perf_counter()
        prompts = [cast(list[int], each.prompt) for each in samples]
        completions = llm.generate(prompts, _samplings(samples, bench.arguments), on_progress=note)
        seconds = time.perf_counter() - started
    output = sum(len(each.token_ids) for each in completions)
    if output != wanted:
        raise SkiffError(f"{title}: {output} tokens came instead of {wanted}")
    work, running = work_of(bench.config, bench.model), bench.config.running_limit
    least = None if bench.rates is None else floor(work, loads, running=running, rates=bench.rates)
    return Round(seconds, sum(each.prompt_tokens for each in completions), output, steps, least)


def _samplings(samples: list[Sample], arguments: argparse.Namespace) -> list[SamplingParams]:
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
    """Profile steps in the middle of one more round, and sum them up."""
    path: Path = bench.arguments.profile
    path.unlink(missing_ok=True)
    _run_round(llm, bench, "profiled round", lambda: llm.profile(path, steps=bench.arguments.profile_steps))
    deadline = time.monotonic() + TRACE_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise SkiffError(f"no profile was written to {path}; the log above may say why")
        time.sleep(0.1)
    events = read_trace(path)
    if not events:
        raise SkiffError("the round was over before a step could be profiled; ask for longer outputs")
    return break_down(events)
