"""The command: flags, the front processes, the loads, the report."""

import argparse
import os
import platform
from pathlib import Path
from typing import Final, get_args

from rich.console import Console
from tokenizers import Tokenizer

from skiff_runtime import log
from skiff_runtime.bench import report
from skiff_runtime.bench.flag_types import natural_int, positive_float, positive_int
from skiff_runtime.bench.online.results import Figures
from skiff_runtime.bench.path.frontend_processes import FrontendProcesses
from skiff_runtime.bench.path.scheduler_steps import scheduler_steps
from skiff_runtime.bench.path.serving_path import Loads, PathBench
from skiff_runtime.config import Config, TokenizerBackend
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.processes.resolve import resolve

DESCRIPTION: Final = """\
What the serving path costs, the engine apart: the real API, tokenizer and detokenizer processes,
and a stub in the scheduler's place that gives every running request one token a step."""
EPILOG: Final = """\
Figures: CPU-microseconds of each process for a request and for a token, how old a token is when the
client has it, how late the tokens of running streams are while long prompts come in, resident memory;
and what a decode step costs the whole scheduler over an engine that takes no time.

examples:
  skiff bench path
  skiff bench path --tokenizer-backend fastokens
  skiff bench path --tokenizer-worker-num 0 --output path.json
"""
_TOKEN_TEXT: Final = " pod"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench path``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    counts = (
        ("--requests", 2000, "requests of one token"),
        ("--input-len", 200, "their prompts, in tokens"),
        ("--streams", 256, "streams at a time"),
        ("--output-len", 400, "their tokens"),
        ("--long-prompts", 8, "long prompts that come in beside the streams"),
        ("--long-input-len", 30_000, "their length in tokens"),
        ("--scheduler-steps", 500, "decode steps of the scheduler alone"),
    )
    parser.add_argument(
        "--model", default="demo://", help="whose tokenizer and chat template are used (default: %(default)s)"
    )
    for name, default, text in counts:
        parser.add_argument(
            name, type=positive_int, default=default, metavar="N", help=f"{text} (default: %(default)s)"
        )
    parser.add_argument(
        "--step-ms", type=positive_float, default=10.0, metavar="MS", help="one step (default: %(default)s)"
    )
    parser.add_argument(
        "--tokenizer-worker-num",
        type=natural_int,
        default=1,
        metavar="N",
        help="processes (default: %(default)s)",
    )
    parser.add_argument(
        "--tokenizer-backend",
        choices=get_args(TokenizerBackend),
        default="tokenizers",
        help="who encodes prompts (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and write the figures; the exit code."""
    log.configure("bench", "warning")
    loads = Loads(
        requests=arguments.requests,
        prompt_tokens=arguments.input_len,
        streams=arguments.streams,
        stream_tokens=arguments.output_len,
        long_prompts=arguments.long_prompts,
        long_prompt_tokens=arguments.long_input_len,
        step_seconds=arguments.step_ms / 1e3,
    )
    with FrontendProcesses(
        arguments.model,
        tokenizer_worker_num=arguments.tokenizer_worker_num,
        tokenizer_backend=arguments.tokenizer_backend,
        step_milliseconds=arguments.step_ms,
        token=_token(arguments.model),
    ) as fronts:
        figures = PathBench(fronts, loads).run()
    figures["scheduler_us"] = scheduler_steps(arguments.scheduler_steps)
    machine = {"cores": os.cpu_count(), "python": platform.python_version()}
    figures = {"benchmark": "path", "machine": machine, **figures}
    _show(figures)
    if arguments.output is not None:
        report.write(arguments.output, figures)
    return EXIT_OK


def _token(model: str) -> int:
    """A token that writes plain text."""
    path = resolve(Config(model=model))[1].tokenizer_path / "tokenizer.json"
    token: int = Tokenizer.from_file(str(path)).encode(_TOKEN_TEXT, add_special_tokens=False).ids[-1]
    return token


def _show(figures: Figures) -> None:
    requests, streams, rss = figures["requests"], figures["streams"], figures["rss_mib"]
    rows = [
        (name, f"{requests['us'][name]:,.0f}", f"{streams['us'][name]:,.2f}", f"{rss[name]:,.0f}")
        for name in rss
    ]
    together = (
        f"{requests['us_together']:,.0f}",
        f"{streams['us_together']:,.2f}",
        f"{sum(rss.values()):,.0f}",
    )
    console = Console(highlight=False)
    heads = ("process", "CPU-us a request", "CPU-us a token", "RSS MiB")
    console.print(report.table(heads, [*rows, ("together", *together)]))
    age, late = streams["age_ms"], figures["stall"]["late_ms"]
    console.print(
        f"{streams['tokens_per_second']:,.0f} tokens/s; a token is {age['p50']:.2f} ms old at the client (p50), "
        f"{age['p99']:.2f} (p99)"
    )
    steps = ", ".join(f"{us:,.0f} at batch {batch}" for batch, us in figures["scheduler_us"].items())
    console.print(f"scheduler, CPU-us a decode step: {steps}")
    console.print(f"beside long prompts tokens are {late['p50']:.2f} ms late (p50), {late['p99']:.2f} (p99)")
