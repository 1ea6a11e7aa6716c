"""The flags of ``skiff bench serve``."""

import argparse
import os
from pathlib import Path
from typing import Any, Final

from skiff_runtime.bench.flag_types import (
    Span,
    natural_float,
    natural_int,
    positive_float,
    positive_int,
    rates,
)
from skiff_runtime.bench.online.arrival_trace import UNITS
from skiff_runtime.bench.online.runner import PATHS
from skiff_runtime.contract import API_PORT

DESCRIPTION: Final = """\
Open-loop load against a running server: requests leave at the moments of a seeded Poisson
process, or of a recorded trace, however slow the answers to earlier ones are, as users do."""
EPILOG: Final = """\
Latencies are those of the requests that succeeded, from the moment each was written. How
late the client itself was is shown apart: where that is not small, the load was not open.
Goodput counts the requests that kept both limits: --slo-ttft-ms for the first token, and
--slo-itl-ms for the mean of a request's inter-token latencies. With several rates, each is
a run of its own, with prompts of its own. The exit code is 0 when at least one request of
each run succeeded.

examples:
  skiff bench serve                                          100 requests, 4 a second
  skiff bench serve --request-rate inf --max-concurrency 64  as fast as 64 at a time go
  skiff bench serve --request-rate 1,2,4,8 --slo-ttft-ms 500 --slo-itl-ms 50 \\
      --output result.json --plot result.png                 a sweep, with goodput and a picture
  skiff bench serve --trace traffic.csv                      recorded arrivals and lengths
  skiff bench serve --trace traffic.jsonl --trace-unit ms --request-rate 2,4    the same, faster
  skiff bench serve --endpoint chat --dataset sharegpt.json  recorded questions
  skiff bench serve --prefix-groups 8 --prompts-per-group 16 --prefix-len 1024
  skiff bench compare before.json after.json                 two results side by side
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench serve``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    server = parser.add_argument_group("server")
    server.add_argument(
        "--url", default=f"http://127.0.0.1:{API_PORT}", help="the server (default: %(default)s)"
    )
    server.add_argument("--model", metavar="NAME", help="served name (default: the first one)")
    server.add_argument(
        "--endpoint",
        choices=sorted(PATHS),
        default="completions",
        help="completions sends token ids, chat sends words (default: %(default)s)",
    )
    server.add_argument(
        "--api-key",
        default=os.environ.get("SKIFF_API_KEY", "").partition(",")[0] or None,
        metavar="KEY",
        help="where the server wants one (default: the first of $SKIFF_API_KEY)",
    )
    _add_load(parser.add_argument_group("load"))
    _add_requests(parser.add_argument_group("requests"))
    _add_prefixes(parser.add_argument_group("prompts that share their beginnings"))
    result = parser.add_argument_group("result")
    result.add_argument(
        "--slo-ttft-ms", type=positive_float, metavar="MS", help="goodput: first token by then"
    )
    result.add_argument(
        "--slo-itl-ms", type=positive_float, metavar="MS", help="goodput: mean inter-token latency up to this"
    )
    result.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    result.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw TTFT and ITL over the request rates; .png, .svg or .pdf",
    )


def _add_load(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--num-prompts",
        type=positive_int,
        metavar="N",
        help="requests of a run (default: 100, or all of a trace)",
    )
    group.add_argument(
        "--request-rate",
        type=rates,
        metavar="R,...",
        help="a second, one run for each; inf: all at once (default: 4, or as recorded)",
    )
    group.add_argument(
        "--max-concurrency", type=positive_int, metavar="N", help="hold back beyond so many at a time"
    )
    group.add_argument(
        "--warmup",
        type=natural_int,
        default=1,
        metavar="N",
        help="requests before, not counted (default: %(default)s)",
    )
    group.add_argument(
        "--timeout-seconds",
        type=positive_float,
        default=600.0,
        metavar="S",
        help="of one request (default: %(default)s)",
    )
    group.add_argument(
        "--max-seconds",
        type=positive_float,
        default=3600.0,
        metavar="S",
        help="of the run (default: %(default)s)",
    )
    group.add_argument(
        "--seed",
        type=natural_int,
        default=0,
        metavar="N",
        help="of prompts, lengths, arrivals (default: %(default)s)",
    )


def _add_requests(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--input-len",
        type=Span.parse,
        metavar="LEN",
        help="tokens, or LOW:HIGH (default: 128)",
    )
    group.add_argument(
        "--output-len",
        type=Span.parse,
        metavar="LEN",
        help="tokens, or LOW:HIGH (default: 64, or that of a recorded answer)",
    )
    group.add_argument(
        "--vocabulary",
        type=positive_int,
        default=1000,
        metavar="N",
        help="random token ids are below it (default: %(default)s)",
    )
    group.add_argument(
        "--dataset",
        type=Path,
        metavar="FILE",
        help="JSON lines with prompt or messages, or ShareGPT's JSON, instead of random prompts",
    )
    group.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="CSV or JSON lines with timestamp, input length and output length of each request",
    )
    group.add_argument(
        "--trace-unit",
        choices=sorted(UNITS),
        default="s",
        help="of its timestamps, where they are numbers (default: %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=natural_float,
        default=0.6,
        metavar="T",
        help="0 is greedy (default: %(default)s)",
    )
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="have every answer as long as asked for; not every server knows this (default: yes)",
    )


def _add_prefixes(group: "argparse._ArgumentGroup") -> None:
    for name, kind, default, text in _PREFIXES:
        group.add_argument(name, type=kind, default=default, metavar="N", help=text)


_PREFIXES: Final[tuple[tuple[str, Any, int | None, str], ...]] = (
    ("--prefix-groups", positive_int, None, "so many shared prefixes; --input-len is each prompt's own part"),
    ("--prompts-per-group", positive_int, 16, "prompts that share one (default: %(default)s)"),
    ("--prefix-len", positive_int, 1024, "tokens that they share (default: %(default)s)"),
)
