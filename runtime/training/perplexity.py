"""The cost of quantization: perplexity of the demo model on chats outside of its training data.

PYTHONPATH=runtime/training python runtime/training/perplexity.py [--device cuda]

Answers are what the model knows by heart; questions it was not taught to write, so there it is unsure, and small
errors show. Agreement is the share of all positions at which the likeliest next token is that of the first line.

Below the first lines are the formats of checkpoints, to which the model is rounded without calibration; all of these
compute in float32, so that the difference from the first line is the cost of the format alone.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from build_tokenizer import END
from evaluate import late_cases, rendered, template_cases
from quantized_formats import FORMATS, write_checkpoint

from skiff_runtime import demo
from skiff_runtime.offline.llm import LLM
from skiff_runtime.offline.sampling_params import SamplingParams

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "FP8 weights": {"quantization": "fp8"},
    "FP8 KV cache": {"kv_cache_dtype": "fp8_e4m3"},
    "both": {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
}
QUANTIZED = tuple(name for name in FORMATS if not name.endswith("static"))
"""Formats whose activations need no calibration."""
COUNT = 100


@dataclass
class ChatLogprobs:
    """Losses in nats of the tokens of questions and of answers, and the likeliest token at every position."""

    questions: list[float] = field(default_factory=list)
    answers: list[float] = field(default_factory=list)
    likeliest: list[int] = field(default_factory=list)


@contextmanager
def quantized_model(name: str) -> Iterator[str]:
    """The directory of the demo model in the format ``name``, or its address if there is no such format."""
    if name not in QUANTIZED:
        yield "demo://"
        return
    with TemporaryDirectory() as folder:
        path = Path(shutil.copytree(demo.DIRECTORY, Path(folder) / "model"))
        write_checkpoint(path, FORMATS[name])
        yield str(path)


def measure(name: str, device: str, options: dict[str, Any], count: int) -> ChatLogprobs:
    """The perplexity of one configuration on the chats."""
    logprobs = ChatLogprobs()
    with (
        quantized_model(name) as model,
        LLM(model, device=device, **{"dtype": "bfloat16", **options}) as llm,
    ):
        cases = [*template_cases(count, trained=False), *late_cases(count // 4)]
        starts = [llm.encode(rendered(case), add_special_tokens=False) for case in cases]
        prompts = [
            llm.encode(rendered(case) + case.expected + END, add_special_tokens=False) for case in cases
        ]
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0.0)
        for start, done in zip(starts, llm.generate(prompts, sampling), strict=True):
            for place, each in enumerate(done.prompt_logprobs):
                if each.logprob is not None:
                    (logprobs.questions if place < len(start) else logprobs.answers).append(-each.logprob)
                    logprobs.likeliest.append(each.top[0].token_id)
    return logprobs


def perplexity(losses: list[float]) -> float:
    """Of tokens with these losses."""
    return math.exp(sum(losses) / len(losses))


def main() -> None:
    """Print a line for each configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--count", type=int, default=COUNT, help="questions (default: %(default)s)")
    known = (*CONFIGURATIONS, *QUANTIZED)
    parser.add_argument(
        "names",
        nargs="*",
        default=known,
        metavar="NAME",
        help="lines, the first one of which others are compared with (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in known]:
        parser.error(f"no such line: {', '.join(unknown)}; known are {', '.join(known)}")
    first: list[int] = []
    for name in arguments.names:
        options = CONFIGURATIONS.get(name, {"dtype": "float32"})
        logprobs = measure(name, arguments.device, options, arguments.count)
        first = first or logprobs.likeliest
        same = sum(a == b for a, b in zip(logprobs.likeliest, first, strict=True)) / len(first)
        print(
            f"{name:28}  questions {perplexity(logprobs.questions):.4f}  answers {perplexity(logprobs.answers):.6f}  "
            f"agreement {same:.2%}  of {len(first)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
