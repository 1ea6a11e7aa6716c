"""The flags of ``skiff bench offline``."""

import argparse
from pathlib import Path
from typing import Final

from skiff_runtime.bench.flag_types import Span, natural_float, natural_int, positive_int
from skiff_runtime.bench.workload import Prefixes
from skiff_runtime.config.arguments import add_config_arguments

DESCRIPTION: Final = """\
Throughput of the engine without HTTP: all requests are given at once, as random token ids
of random lengths, and every answer runs to its full length."""
EPILOG: Final = """\
Each round draws new prompts, so that no prefix of an earlier one is found again. The first
round warms up and is shown, but not counted when there are more.

The roofline is the least time that the workload could take at the rates of copies and of
matrix products that this machine shows (measured first, in a process of its own).

examples:
  skiff bench offline --model hf://Qwen/Qwen3-0.6B --max-model-len 4096 --max-num-batched-tokens 16384
  skiff bench offline --model shape://qwen3-14b --load-format dummy --rounds 3
  skiff bench offline --model shape://llama-3.1-8b --load-format dummy --workload shared-prefix
  skiff bench offline --num-requests 16 --input-len 10:100 --output-len 10:100     on a CPU
"""
RANDOM: Final = "random"
SHARED: Final = "shared-prefix"
_SERVER_ONLY: Final = ("host", "port", "tokenizer_worker_num", "max_request_bytes", "drain_timeout_seconds")
_DEFAULT_LENGTHS: Final = {RANDOM: Span(100, 1024), SHARED: Span(128, 128)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them, those of ``skiff serve`` included."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    _add_workload(parser.add_argument_group("Workload"))
    result = parser.add_argument_group("Result")
    result.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    result.add_argument(
        "--profile",
        type=Path,
        metavar="FILE",
        help="after the rounds, profile some steps of one more: a trace for chrome://tracing (.json or .json.gz), "
        "and a table of where the time goes",
    )
    result.add_argument(
        "--profile-steps", type=positive_int, default=32, metavar="N", help="default: %(default)s"
    )
    result.add_argument(
        "--roofline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure the machine first, and tell the share of the roofline that was reached",
    )
    add_config_arguments(parser, skip=_SERVER_ONLY)


def lengths(arguments: argparse.Namespace) -> tuple[Span, Span]:
    """Of prompts (their own part) and of outputs."""
    default = _DEFAULT_LENGTHS[arguments.workload]
    return arguments.input_len or default, arguments.output_len or default


def prefixes(arguments: argparse.Namespace) -> Prefixes | None:
    """What prompts share, if the workload is of that kind."""
    if arguments.workload == RANDOM:
        return None
    return Prefixes(arguments.prefix_groups, arguments.prompts_per_group, arguments.prefix_len)


def _add_workload(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--workload",
        choices=(RANDOM, SHARED),
        default=RANDOM,
        help="prompts that share nothing, or groups that begin alike, in a random order (default: %(default)s)",
    )
    group.add_argument(
        "--num-requests", type=positive_int, default=256, metavar="N", help="a round (default: %(default)s)"
    )
    for name in ("--input-len", "--output-len"):
        group.add_argument(
            name,
            type=Span.parse,
            metavar="LEN",
            help=f"tokens, or LOW:HIGH (default: {_DEFAULT_LENGTHS[RANDOM]}; shared-prefix: {_DEFAULT_LENGTHS[SHARED]})",
        )
    for name, default, text in _PREFIXES:
        group.add_argument(
            name, type=positive_int, default=default, metavar="N", help=f"{text} (default: {default})"
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


_PREFIXES: Final = (
    ("--prefix-groups", 64, "shared-prefix: how many prefixes; --input-len is each prompt's own part"),
    ("--prompts-per-group", 16, "shared-prefix: prompts that share one"),
    ("--prefix-len", 2048, "shared-prefix: tokens that they share"),
)
