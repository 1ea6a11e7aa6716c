"""``skiff bench structured``: time per decode step to advance grammar matchers and fill their token bitmasks.

The matchers are advanced row by row on one thread, and in batches on several threads, as the engine does. All
methods take the same seeded walks through a JSON schema's grammar, and their bitmasks must be equal. The benchmark
needs neither a model nor a GPU: bitmasks are filled on the host during the forward pass, and delay a step only if they
take longer.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from skiff_runtime.bench.flag_types import natural_int, positive_int, positive_ints
from skiff_runtime.bench.report import make_table, write_json
from skiff_runtime.config.arguments import add_renamed_flags
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.errors import SkiffError
from skiff_runtime.grammar.spec import json_schema_grammar
from skiff_runtime.models.config import read_model_config
from skiff_runtime.progress import ProgressBar
from skiff_runtime.step import Int32

# xgrammar imports torch, for which neither --help nor `skiff complete` waits: it is imported where it is used.
if TYPE_CHECKING:
    import xgrammar

    from skiff_runtime.grammar.matcher import GrammarMatcher

EPILOG: Final = """\
examples:
  skiff bench structured                                   batches of 1, 32 and 256, 151,936 tokens
  skiff bench structured --model /models/qwen3-8b --batch-size 256 --threads 1,4,8
"""
CLOSING: Final = 0.15
"""Probability of closing a string at a step that allows it. Random tokens would almost never close one."""


def _schema(text: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object whose strings match ``text``, with an enum, digits and a list beside them."""
    address = {
        "type": "object",
        "properties": {"street": text, "code": {"type": "string", "pattern": "^[0-9]{5}$"}},
        "required": ["street", "code"],
        "additionalProperties": False,
    }
    properties = {
        "name": text,
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["person", "company", "ship"]},
        "tags": {"type": "array", "items": text, "maxItems": 4},
        "address": address,
    }
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: Final = {
    "free strings": _schema({"type": "string"}),
    "maxLength 40": _schema({"type": "string", "maxLength": 40}),
}
"""By the kind of strings. Close to maxLength, the matcher must try each token of the vocabulary by its length."""

MIN_VOCAB_SIZE: Final = 512
"""The 256 bytes, and as many syllables and numbers."""

Advance = Callable[[Sequence["GrammarMatcher"], Sequence[int], Sequence[int]], None]
"""Advances each of the matchers, whose bitmasks are in the given slots, by one token."""


@dataclass(frozen=True, slots=True)
class WalkSpec:
    """Walks of a batch under one grammar. ``closing``, int64[N]: the tokens that can close a string."""

    schema: str
    grammar: "xgrammar.CompiledGrammar"
    rows: int
    steps: int
    seed: int
    closing: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MaskTimes:
    """Milliseconds per step of one method. ``threads`` is 0 for row by row."""

    schema: str
    rows: int
    threads: int
    steps: int
    median_ms: float
    p99_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench structured``."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--batch-size",
        type=positive_ints,
        default=(1, 32, 256),
        metavar="N,...",
        help="numbers of rows that decode together (default: 1,32,256)",
    )
    parser.add_argument(
        "--threads",
        type=positive_ints,
        default=None,
        metavar="N,...",
        help="numbers of threads for a batch (default: 1, 2, 4 and 8, up to the number of cores)",
    )
    parser.add_argument("--steps", type=positive_int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--vocab-size",
        type=_vocab_size,
        default=151_936,
        metavar="N",
        help=f"size of a synthetic vocabulary of syllables, digits and signs; at least {MIN_VOCAB_SIZE} "
        "(default: %(default)s)",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="use the vocabulary of this model instead")
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write all figures as JSON")
    add_renamed_flags(parser, {"--rows": "--batch-size", "--output": "--output-json"})


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write the figures, and return the exit code."""
    from skiff_runtime.grammar.tokenizer_info import read_tokenizer_info

    tokenizer = (
        make_synthetic_vocabulary(arguments.vocab_size, arguments.seed)
        if arguments.model is None
        else read_tokenizer_info(read_model_config(arguments.model))
    )
    cores = len(os.sched_getaffinity(0))
    methods = (0, *(arguments.threads or [each for each in (1, 2, 4, 8) if each <= cores]))
    closing = _find_closing_tokens(tokenizer)
    results: list[MaskTimes] = []
    total = len(SCHEMAS) * len(arguments.batch_size) * len(methods) * arguments.steps
    with ProgressBar("structured", total) as counter:
        for name in SCHEMAS:
            grammar = _compile(tokenizer, name)
            for rows in arguments.batch_size:
                spec = WalkSpec(name, grammar, rows, arguments.steps, arguments.seed, closing)
                walks: list[list[int]] = []  # drawn with the first method, and repeated with the others
                checksums = []
                for threads in methods:
                    result, checksum = _measure(spec, threads, walks, lambda: counter.advance(done=1))
                    results.append(result)
                    checksums.append(checksum)
                if len(set(checksums)) != 1:
                    raise SkiffError(f"the bitmasks of {rows} rows differ between the methods")
    _show(results, tokenizer.vocab_size, cores)
    if arguments.output_json is not None:
        figures: dict[str, Any] = {
            "benchmark": "structured",
            "vocab_size": tokenizer.vocab_size,
            "cores": cores,
        }
        write_json(arguments.output_json, {**figures, "runs": [asdict(each) for each in results]})
    return EXIT_OK


def _vocab_size(text: str) -> int:
    size = positive_int(text)
    if size < MIN_VOCAB_SIZE:
        raise argparse.ArgumentTypeError(f"must be at least {MIN_VOCAB_SIZE}, not {text!r}")
    return size


def make_synthetic_vocabulary(size: int, seed: int) -> "xgrammar.TokenizerInfo":
    """Return a vocabulary like that of a byte-level BPE: bytes, words of syllables, numbers, signs, and EOS."""
    import xgrammar

    generator = np.random.default_rng(seed)
    tokens = dict.fromkeys(bytes([each]) for each in range(256))
    while len(tokens) < size - 1:
        tokens[_make_token(generator)] = None
    return xgrammar.TokenizerInfo(
        [*tokens, b""], xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[size - 1]
    )


def _make_token(generator: np.random.Generator) -> bytes:
    kind, length = generator.random(), int(generator.integers(1, 5))
    if kind < 0.06:
        return "".join(generator.choice(list('{}[]",:.;()=<>-_/\\\n '), length)).encode()
    if kind < 0.08:
        return str(generator.integers(0, 1000)).encode()
    if kind < 0.12:
        return "".join(map(chr, generator.integers(0x4E00, 0x9FFF, length))).encode()
    syllables = zip(
        generator.choice(list("bcdfghjklmnpqrstvwz"), length),
        generator.choice(list("aeiou"), length),
        generator.choice(["", "n", "r", "s", "t"], length),
        strict=True,
    )
    word = "".join("".join(each) for each in syllables)
    return ((" " if kind < 0.75 else "") + (word.capitalize() if 0.65 < kind < 0.85 else word)).encode()


def _compile(tokenizer: "xgrammar.TokenizerInfo", schema: str) -> "xgrammar.CompiledGrammar":
    """Return a compiled grammar after the round trip through JSON that it takes between processes."""
    import xgrammar

    from skiff_runtime.grammar.compiler.grammar_compiler import GrammarCompiler

    data = GrammarCompiler(tokenizer).compile(json_schema_grammar(SCHEMAS[schema], "schema"))
    return xgrammar.CompiledGrammar.deserialize_json(data.decode(), tokenizer)


def _find_closing_tokens(tokenizer: "xgrammar.TokenizerInfo") -> NDArray[np.int64]:
    return np.array([token for token, text in enumerate(tokenizer.decoded_vocab) if b'"' in text], np.int64)


def _measure(
    spec: WalkSpec, threads: int, walks: list[list[int]], on_step: Callable[[], object]
) -> tuple[MaskTimes, int]:
    """Return the times of one method, and a checksum of all bitmasks that it has filled.

    ``walks`` contains the tokens of each step; if it ends before the last step, further ones are drawn and appended.
    """
    from skiff_runtime.grammar.matcher import BatchGrammarMatcher
    from skiff_runtime.kernels.token_bitmask import bitmask_words

    bitmasks = np.zeros((spec.rows, bitmask_words(spec.grammar.tokenizer_info.vocab_size)), np.int32)
    matchers = [_make_matcher(spec.grammar, bitmask) for bitmask in bitmasks]
    advance: Advance = BatchGrammarMatcher(bitmasks, threads).accept if threads else _row_by_row
    generator = np.random.default_rng(spec.seed)
    seconds, checksum = [], 0
    for step in range(spec.steps):
        if step == len(walks):
            walks.append([_draw_token(bitmask, generator, spec.closing) for bitmask in bitmasks])
        tokens = walks[step]
        started = perf_counter()
        advance(matchers, range(spec.rows), tokens)
        seconds.append(perf_counter() - started)
        for row, matcher in enumerate(matchers):
            if not matcher.is_active:  # its output has ended: another one begins
                matchers[row] = _make_matcher(spec.grammar, bitmasks[row])
        checksum = crc32(bitmasks.tobytes(), checksum)
        on_step()
    times = 1e3 * np.array(seconds)
    median, p99 = float(np.median(times)), float(np.percentile(times, 99))
    return MaskTimes(spec.schema, spec.rows, threads, len(times), median, p99), checksum


def _make_matcher(grammar: "xgrammar.CompiledGrammar", bitmask: Int32) -> "GrammarMatcher":
    from skiff_runtime.grammar.matcher import GrammarMatcher

    matcher = GrammarMatcher(grammar, bitmask)
    matcher.fill()
    return matcher


def _row_by_row(matchers: Sequence["GrammarMatcher"], slots: Sequence[int], tokens: Sequence[int]) -> None:
    for matcher, token in zip(matchers, tokens, strict=True):
        matcher.accept((token,))


def _draw_token(bitmask: Int32, generator: np.random.Generator, closing: NDArray[np.int64]) -> int:
    """Draw a token that the bitmask allows, with a preference for one that closes a string."""
    bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
    ends = closing[bits[closing] == 1]
    if len(ends) and generator.random() < CLOSING:
        return int(generator.choice(ends))
    return int(generator.choice(np.flatnonzero(bits)))


def _show(results: Sequence[MaskTimes], vocab_size: int, cores: int) -> None:
    console = Console(highlight=False)
    console.print(
        f"{vocab_size:,} tokens, {cores} cores; accepting a token and filling the bitmask of each row"
    )
    lines = [
        (
            each.schema,
            str(each.rows),
            f"batch, {each.threads} threads" if each.threads else "row by row",
            f"{each.median_ms:.3f}",
            f"{each.p99_ms:.3f}",
        )
        for each in results
    ]
    console.print(make_table(("schema", "rows", "method", "median ms", "p99 ms"), lines))
