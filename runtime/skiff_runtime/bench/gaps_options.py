"""The flags of ``skiff bench gaps``."""

import argparse
from pathlib import Path
from typing import Final

from skiff_runtime.bench.flag_types import natural_int, positive_int
from skiff_runtime.config.arguments import add_config_arguments

OFF: Final = 0
"""Among the chunks: no bound but --max-num-batched-tokens."""
DESCRIPTION: Final = """\
How long those that decode wait for their next token while a long prompt is computed beside
them: scheduler and engine in one process, once for each bound of --mixed-prefill-tokens."""
EPILOG: Final = """\
Quiet is the median time between two tokens of a stream before the prompt comes; median and
largest are those of all streams from then until its first token; the ratio is that of the
largest to quiet.

examples:
  skiff bench gaps --model shape://llama-3.1-8b --load-format dummy --max-num-batched-tokens 8192
  skiff bench gaps --streams 8 --context 50 --prompt-len 1000 --chunks all,128,32     on a CPU
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare them, those of the engine included."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    group = parser.add_argument_group("Workload")
    for name, default, text in _COUNTS:
        group.add_argument(
            name, type=positive_int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    group.add_argument(
        "--chunks",
        type=chunks,
        default=chunks("all,2048,1024,512,256"),
        metavar="N,...",
        help="most prompt tokens in a step in which others decode; all: what --max-num-batched-tokens leaves "
        "(default: all,2048,1024,512,256)",
    )
    group.add_argument("--seed", type=natural_int, default=0, metavar="N", help="default: %(default)s")
    group.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")
    add_config_arguments(parser, skip=_NOT_HERE)


def chunks(text: str) -> tuple[int, ...]:
    """Numbers of tokens, or ``all``, with commas between."""
    return tuple(OFF if each == "all" else positive_int(each) for each in text.split(","))


_COUNTS: Final = (
    ("--streams", 64, "requests that decode"),
    ("--context", 500, "tokens of each of their prompts"),
    ("--prompt-len", 32768, "tokens of the prompt that comes"),
    ("--quiet-steps", 100, "steps that are measured before it comes"),
)
_NOT_HERE: Final = (
    "host",
    "port",
    "tokenizer_worker_num",
    "max_request_bytes",
    "drain_timeout_seconds",
    "max_running_requests",
    "mixed_prefill_tokens",
)
