"""The cost of quantization: perplexity of a model in several formats, on chats or on texts.

PYTHONPATH=runtime/training python runtime/training/perplexity.py [--device cuda]
PYTHONPATH=runtime/training python runtime/training/perplexity.py --model model.gguf --text docs/*.md docs/*/*.md

Without ``--text``, the demo model reads chats outside of its training data. Answers are what it knows by heart; questions
it was not taught to write, so there it is unsure, and small errors show. Agreement is the share of all positions at which
the likeliest next token is that of the first line.

Below the first lines are the formats of checkpoints, to which the model is rounded without calibration, a GGUF file after
it is dequantized. All of these compute in float32, so that the difference from the first line is the cost of the format
alone.
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

from quantized_formats import FORMATS, write_checkpoint

from skiff_runtime import demo
from skiff_runtime.gguf.header import is_gguf
from skiff_runtime.offline.llm import LLM
from skiff_runtime.offline.sampling_params import SamplingParams

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {},
    "FP8 weights": {"quantization": "fp8"},
    "FP8 KV cache": {"kv_cache_dtype": "fp8_e4m3"},
    "FP8 weights and KV cache": {"quantization": "fp8", "kv_cache_dtype": "fp8_e4m3"},
}
QUANTIZED = tuple(name for name in FORMATS if not name.endswith("static"))
"""Formats whose activations need no calibration."""
DEMO = "demo://"
COUNT = 100
WINDOW = 512
"""Tokens of a text that the model reads at a time."""


@dataclass
class Passage:
    """Token ids, in parts that are counted apart: the name of each part, and the index after its last token."""

    ids: list[int]
    parts: list[tuple[str, int]]


@dataclass
class Losses:
    """Losses in nats of the tokens by part, and the likeliest token at every position."""

    by_part: dict[str, list[float]] = field(default_factory=dict)
    likeliest: list[int] = field(default_factory=list)


def read_chats(llm: LLM, count: int) -> list[Passage]:
    """Return chats that the demo model's training never showed."""
    from build_tokenizer import END
    from evaluate import late_cases, rendered, template_cases

    passages = []
    for case in [*template_cases(count, trained=False), *late_cases(count // 4)]:
        question = llm.encode(rendered(case), add_special_tokens=False)
        ids = llm.encode(rendered(case) + case.expected + END, add_special_tokens=False)
        passages.append(Passage(ids, [("questions", len(question)), ("answers", len(ids))]))
    return passages


def read_texts(llm: LLM, files: list[Path], count: int) -> list[Passage]:
    """Return the first ``count`` windows of each file, of ``WINDOW`` tokens but for the last."""
    passages = []
    for file in files:
        paragraphs = file.read_text().split("\n\n")  # a whole file may be longer than the context
        ids = [
            token
            for paragraph in paragraphs
            for token in llm.encode(f"{paragraph}\n\n", add_special_tokens=False)
        ]
        windows = [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)][:count]
        passages += [Passage(window, [("text", len(window))]) for window in windows if len(window) > 1]
    return passages


@contextmanager
def quantized_model(model: str, name: str) -> Iterator[str]:
    """Yield the directory of the model in the format ``name``, or ``model`` if there is no such format."""
    if name not in QUANTIZED:
        yield model
        return
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        if is_gguf(Path(model)):
            convert_gguf(Path(model), path)
        else:
            shutil.copytree(demo.DIRECTORY if model == DEMO else model, path)
        write_checkpoint(path, FORMATS[name])
        yield str(path)


def convert_gguf(file: Path, directory: Path) -> None:
    """Write the model of a GGUF file as transformers does, dequantized to float32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    # It still counts as quantized, which transformers refuses to write.
    model.hf_quantizer = None
    model.config.quantization_config = None
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(directory)


def measure(llm: LLM, passages: list[Passage]) -> Losses:
    """Compute the losses of one configuration on the passages."""
    losses = Losses()
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=1, temperature=0.0)
    for passage, done in zip(passages, llm.generate([each.ids for each in passages], sampling), strict=True):
        for position, each in enumerate(done.prompt_logprobs):
            if each.logprob is not None:
                part = next(name for name, end in passage.parts if position < end)
                losses.by_part.setdefault(part, []).append(-each.logprob)
                losses.likeliest.append(each.top[0].token_id)
    return losses


def perplexity(losses: list[float]) -> float:
    """Return the perplexity of tokens with these losses."""
    return math.exp(sum(losses) / len(losses))


def main() -> None:
    """Print a line for each configuration."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", default=DEMO, help="the model, as of skiff serve (default: %(default)s)")
    parser.add_argument(
        "--text", nargs="+", type=Path, help="files to read, instead of the demo model's chats"
    )
    parser.add_argument(
        "--count", type=int, default=COUNT, help="questions, or windows of each file (default: %(default)s)"
    )
    known = (*CONFIGURATIONS, *QUANTIZED)
    parser.add_argument(
        "--names", nargs="+", metavar="NAME", help="lines, the first of which others are compared with"
    )
    arguments = parser.parse_args()
    if arguments.text is None and arguments.model != DEMO:
        parser.error("--model needs --text: the chats are in the demo model's vocabulary")
    names = arguments.names or (known if arguments.model == DEMO else tuple(CONFIGURATIONS))
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no such line: {', '.join(unknown)}; known are {', '.join(known)}")
    is_local = arguments.model == DEMO or Path(arguments.model).exists()
    if not is_local and any(name in QUANTIZED for name in names):
        parser.error("only the demo model and files on disk are rounded to the formats of checkpoints")
    limit = {} if arguments.text is None else {"max_model_len": 2 * WINDOW}
    first: list[int] = []
    for name in names:
        options = {"dtype": "bfloat16", **limit, **CONFIGURATIONS.get(name, {"dtype": "float32"})}
        with (
            quantized_model(arguments.model, name) as model,
            LLM(model, device=arguments.device, **options) as llm,
        ):
            if arguments.text is None:
                passages = read_chats(llm, arguments.count)
            else:
                passages = read_texts(llm, arguments.text, arguments.count)
            losses = measure(llm, passages)
        first = first or losses.likeliest
        same = sum(a == b for a, b in zip(losses.likeliest, first, strict=True)) / len(first)
        parts = "  ".join(f"{part} {perplexity(each):.6f}" for part, each in losses.by_part.items())
        print(f"{name:28}  {parts}  agreement {same:.2%}  of {len(first)}", flush=True)


if __name__ == "__main__":
    main()
