"""``skiff bench offline``: throughput of the engine without HTTP, by a workload that is also used elsewhere."""

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

import numpy as np
from rich.console import Console

from skiff_runtime import log
from skiff_runtime.bench import report
from skiff_runtime.bench.results import Figures
from skiff_runtime.bench.values import Span, natural_float, natural_int, positive_int
from skiff_runtime.bench.workload import Sample, random_tokens
from skiff_runtime.config import Config
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.errors import ConfigError, SkiffError
from skiff_runtime.llm import LLM
from skiff_runtime.options import add_config_arguments, config_from
from skiff_runtime.progress import Counter
from skiff_runtime.resolve import resolve
from skiff_runtime.sampling import Sampling

DESCRIPTION: Final = """\
Throughput of the engine without HTTP: all requests are given at once, as random token ids
of random lengths, and every answer runs to its full length."""
EPILOG: Final = """\
Each round draws new prompts, so that no prefix is found again. The first round warms up
and is shown, but not counted when there are more.

examples:
  skiff bench offline --model hf://Qwen/Qwen3-0.6B --max-model-len 4096 --max-batch-tokens 16384
  skiff bench offline --model /models/qwen3-14b --load-format dummy --rounds 3
  skiff bench offline --requests 16 --input-len 10:100 --output-len 10:100     on a CPU
"""
_SERVER_ONLY: Final = ("host", "port", "tokenizers", "max_request_bytes", "drain_timeout_seconds")


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did."""

    seconds: float
    prompt_tokens: int
    output_tokens: int

    @property
    def output_tokens_per_second(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_second(self) -> float:
        return (self.prompt_tokens + self.output_tokens) / self.seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench offline``, those of ``skiff serve`` included."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    group = parser.add_argument_group("Workload")
    group.add_argument(
        "--requests", type=positive_int, default=256, metavar="N", help="a round (default: %(default)s)"
    )
    group.add_argument(
        "--input-len",
        type=Span.parse,
        default=Span(100, 1024),
        metavar="LEN",
        help="tokens, or LOW:HIGH (default: %(default)s)",
    )
    group.add_argument(
        "--output-len",
        type=Span.parse,
        default=Span(100, 1024),
        metavar="LEN",
        help="tokens, or LOW:HIGH (default: %(default)s)",
    )
    group.add_argument("--rounds", type=positive_int, default=3, metavar="N", help="default: %(default)s")
    group.add_argument(
        "--temperature",
        type=natural_float,
        default=0.6,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    group.add_argument("--seed", type=natural_int, default=0, metavar="N", help="default: %(default)s")
    group.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    add_config_arguments(parser, skip=_SERVER_ONLY)


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and write the figures; the exit code."""
    config = config_from(arguments)
    log.configure("bench", config.log_level)
    vocabulary = _check_lengths(config, arguments.input_len, arguments.output_len)
    generator = np.random.default_rng(arguments.seed)
    rounds: list[Round] = []
    with LLM(**asdict(config), on_phase=_phases()) as llm:
        for number in range(1, arguments.rounds + 1):
            samples = random_tokens(
                arguments.requests, arguments.input_len, arguments.output_len, vocabulary, generator
            )
            rounds.append(_run_round(llm, samples, arguments, f"round {number}"))
    figures = _figures(config, arguments, rounds)
    _show(rounds, figures["output_tokens_per_second"])
    if arguments.output is not None:
        report.write(arguments.output, figures)
    return EXIT_OK


def _phases() -> Callable[[str, str], None]:
    """Logs each start phase of each process once, however often its progress is told."""
    last: dict[str, str] = {}

    def note(process: str, phase: str) -> None:
        if last.get(process) != phase:
            last[process] = phase
            log.event("bench_start", process=process, phase=phase)

    return note


def _check_lengths(config: Config, inputs: Span, outputs: Span) -> int:
    """The size of the model's vocabulary; ConfigError where a request could not fit."""
    resolved, model = resolve(config)
    longest = resolved.max_model_len
    if longest is not None and inputs.high + outputs.high > longest:
        raise ConfigError(
            f"--input-len {inputs} and --output-len {outputs} together exceed {longest} tokens, "
            "the most that a request may have here; lower them"
        )
    return model.vocab_size


def _run_round(llm: LLM, samples: list[Sample], arguments: argparse.Namespace, title: str) -> Round:
    samplings = [
        Sampling(
            max_tokens=each.output_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed + index,
            ignore_eos=True,
        )
        for index, each in enumerate(samples)
    ]
    wanted = sum(each.output_tokens for each in samples)
    with Counter(title, wanted) as counter:
        started = time.perf_counter()
        completions = llm.generate(
            [cast(list[int], each.prompt) for each in samples],
            samplings,
            on_progress=lambda count: counter.advance(done=count, tokens=count),
        )
        seconds = time.perf_counter() - started
    output = sum(len(each.token_ids) for each in completions)
    if output != wanted:
        raise SkiffError(f"{title}: {output} tokens came instead of {wanted}")
    return Round(seconds, sum(each.prompt_tokens for each in completions), output)


def _figures(config: Config, arguments: argparse.Namespace, rounds: list[Round]) -> Figures:
    counted = rounds[1:] or rounds
    return {
        "benchmark": "offline",
        "model": config.model,
        "requests": arguments.requests,
        "input_len": str(arguments.input_len),
        "output_len": str(arguments.output_len),
        "temperature": arguments.temperature,
        "seed": arguments.seed,
        "config": asdict(config),
        "rounds": [
            {**asdict(each), "output_tokens_per_second": each.output_tokens_per_second} for each in rounds
        ],
        "output_tokens_per_second": sum(each.output_tokens for each in counted)
        / sum(each.seconds for each in counted),
    }


def _show(rounds: list[Round], overall: float) -> None:
    rows = [
        (
            f"{number}" + (" (warm-up)" if number == 1 and len(rounds) > 1 else ""),
            f"{each.seconds:.2f}",
            f"{each.prompt_tokens:,}",
            f"{each.output_tokens:,}",
            f"{each.output_tokens_per_second:,.1f}",
            f"{each.total_tokens_per_second:,.1f}",
        )
        for number, each in enumerate(rounds, 1)
    ]
    console = Console(highlight=False)
    console.print(report.table(("round", "seconds", "prompt", "output", "output tok/s", "all tok/s"), rows))
    console.print(f"{overall:,.1f} output tokens a second")
