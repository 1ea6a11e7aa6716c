"""``skiff bench structured``: time per decode step to advance grammars and fill their token masks.

Row by row on one thread, and in batches on several, as the engine does. Every way takes the same seeded walks through a
JSON schema's grammar, and the masks of all ways must be equal. Neither a model nor a GPU is needed: masks are filled on
the host, beside the forward pass, and hold up a step only where they take longer than it.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final
from zlib import crc32

import numpy as np
import xgrammar
from numpy.typing import NDArray
from rich.console import Console

from skiff_runtime.bench import report
from skiff_runtime.bench.flag_types import natural_int, positive_int
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.errors import SkiffError
from skiff_runtime.grammar.compiler.grammar_compiler import GrammarCompiler
from skiff_runtime.grammar.matcher import BatchGrammarMatcher, GrammarMatcher
from skiff_runtime.grammar.spec import json_schema_grammar
from skiff_runtime.grammar.tokenizer_info import read_tokenizer_info
from skiff_runtime.kernels.token_bitmask import bitmask_words
from skiff_runtime.models.config import read_model_config
from skiff_runtime.progress import ProgressBar
from skiff_runtime.step import Int32

EPILOG: Final = """\
examples:
  skiff bench structured                                   1, 32 and 256 rows of 151,936 tokens
  skiff bench structured --model /models/qwen3-8b --rows 256 --threads 1,4,8
"""
CLOSING: Final = 0.15
"""Share of a walk's steps that close a string where one can be closed: random tokens alone would hardly ever."""


def _schema(text: dict[str, Any]) -> dict[str, Any]:
    """An object whose strings are ``text``, beside an enum, digits and a list."""
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
"""By the kind of their strings: near a longest length, each token of the vocabulary must be tried by its length."""

MIN_VOCAB_SIZE: Final = 512
"""Every byte is a token, and as many syllables and numbers follow."""

Advance = Callable[[Sequence[GrammarMatcher], Sequence[int], Sequence[int]], None]
"""Goes on with one token of each follower; the slots of their masks are in the middle."""


@dataclass(frozen=True, slots=True)
class Load:
    """Walks of ``rows`` answers under one grammar; ``closing`` int64[N]: the tokens that close a string."""

    schema: str
    grammar: xgrammar.CompiledGrammar
    rows: int
    steps: int
    seed: int
    closing: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds per step over all ``steps`` of one way; ``threads`` 0: row by row."""

    schema: str
    rows: int
    threads: int
    steps: int
    median_ms: float
    p99_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--rows",
        type=_counts,
        default=(1, 32, 256),
        metavar="N,...",
        help="answers that decode together (default: 1,32,256)",
    )
    parser.add_argument(
        "--threads",
        type=_counts,
        default=None,
        metavar="N,...",
        help="of a batch (default: 1, 2, 4, 8, up to the cores)",
    )
    parser.add_argument("--steps", type=positive_int, default=32, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--vocab-size",
        type=_vocab_size,
        default=151_936,
        metavar="N",
        help=f"tokens of a made-up vocabulary of syllables, digits and signs; at least {MIN_VOCAB_SIZE} "
        "(default: %(default)s)",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="use the vocabulary of this model instead")
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and write the figures; the exit code."""
    vocabulary = (
        made_up_vocabulary(arguments.vocab_size, arguments.seed)
        if arguments.model is None
        else read_tokenizer_info(read_model_config(arguments.model))
    )
    cores = len(os.sched_getaffinity(0))
    ways = (0, *(arguments.threads or [each for each in (1, 2, 4, 8) if each <= cores]))
    closing = _closing(vocabulary)
    results: list[Result] = []
    with ProgressBar(
        "structured", len(SCHEMAS) * len(arguments.rows) * len(ways) * arguments.steps
    ) as counter:
        for name in SCHEMAS:
            grammar = _compiled(vocabulary, name)
            for rows in arguments.rows:
                load = Load(name, grammar, rows, arguments.steps, arguments.seed, closing)
                walks: list[list[int]] = []  # of the first way; the others go along with it
                checksums = []
                for threads in ways:
                    result, checksum = _measure(load, threads, walks, lambda: counter.advance(done=1))
                    results.append(result)
                    checksums.append(checksum)
                if len(set(checksums)) != 1:
                    raise SkiffError(f"masks of {rows} rows differ between the ways of filling them")
    _show(results, vocabulary.vocab_size, cores)
    if arguments.output is not None:
        figures: dict[str, Any] = {
            "benchmark": "structured",
            "vocabulary": vocabulary.vocab_size,
            "cores": cores,
        }
        report.write(arguments.output, {**figures, "runs": [asdict(each) for each in results]})
    return EXIT_OK


def _vocab_size(text: str) -> int:
    size = positive_int(text)
    if size < MIN_VOCAB_SIZE:
        raise argparse.ArgumentTypeError(f"must be at least {MIN_VOCAB_SIZE}, not {text!r}")
    return size


def made_up_vocabulary(size: int, seed: int) -> xgrammar.TokenizerInfo:
    """Return a vocabulary like that of a byte-level BPE: every byte, words of syllables, numbers, signs; the last token ends."""
    generator = np.random.default_rng(seed)
    tokens = dict.fromkeys(bytes([each]) for each in range(256))
    while len(tokens) < size - 1:
        tokens[_made_up_token(generator)] = None
    return xgrammar.TokenizerInfo(
        [*tokens, b""], xgrammar.VocabType.RAW, vocab_size=size, stop_token_ids=[size - 1]
    )


def _made_up_token(generator: np.random.Generator) -> bytes:
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


def _compiled(vocabulary: xgrammar.TokenizerInfo, schema: str) -> xgrammar.CompiledGrammar:
    """The grammar as an engine gets it from the compiler process."""
    data = GrammarCompiler(vocabulary).compile(json_schema_grammar(SCHEMAS[schema], "schema"))
    return xgrammar.CompiledGrammar.deserialize_json(data.decode(), vocabulary)


def _closing(vocabulary: xgrammar.TokenizerInfo) -> NDArray[np.int64]:
    return np.array([token for token, text in enumerate(vocabulary.decoded_vocab) if b'"' in text], np.int64)


def _measure(
    load: Load, threads: int, walks: list[list[int]], on_step: Callable[[], object]
) -> tuple[Result, int]:
    """Return the times of one way, and a checksum of all masks that it filled.

    ``walks`` holds the tokens of each step; where it is too short, they are drawn.
    """
    masks = np.zeros((load.rows, bitmask_words(load.grammar.tokenizer_info.vocab_size)), np.int32)
    followers = [_opened(load.grammar, mask) for mask in masks]
    advance: Advance = BatchGrammarMatcher(masks, threads).accept if threads else _row_by_row
    generator = np.random.default_rng(load.seed)
    seconds, checksum = [], 0
    for step in range(load.steps):
        if step == len(walks):
            walks.append([_walk(mask, generator, load.closing) for mask in masks])
        tokens = walks[step]
        started = perf_counter()
        advance(followers, range(load.rows), tokens)
        seconds.append(perf_counter() - started)
        for row, follower in enumerate(followers):
            if not follower.is_active:  # its answer has ended: another begins
                followers[row] = _opened(load.grammar, masks[row])
        checksum = crc32(masks.tobytes(), checksum)
        on_step()
    times = 1e3 * np.array(seconds)
    median, p99 = float(np.median(times)), float(np.percentile(times, 99))
    return Result(load.schema, load.rows, threads, len(times), median, p99), checksum


def _opened(grammar: xgrammar.CompiledGrammar, mask: Int32) -> GrammarMatcher:
    follower = GrammarMatcher(grammar, mask)
    follower.fill()
    return follower


def _row_by_row(followers: Sequence[GrammarMatcher], slots: Sequence[int], tokens: Sequence[int]) -> None:
    for follower, token in zip(followers, tokens, strict=True):
        follower.accept((token,))


def _walk(mask: Int32, generator: np.random.Generator, closing: NDArray[np.int64]) -> int:
    """One of the tokens that the mask admits, with a preference for the end of a string."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    ends = closing[bits[closing] == 1]
    if len(ends) and generator.random() < CLOSING:
        return int(generator.choice(ends))
    return int(generator.choice(np.flatnonzero(bits)))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(positive_int(each) for each in text.split(","))


def _show(results: Sequence[Result], vocab_size: int, cores: int) -> None:
    console = Console(highlight=False)
    console.print(f"{vocab_size:,} tokens, {cores} cores; accepting a token and filling the mask of each row")
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
    console.print(report.table(("schema", "rows", "way", "median ms", "p99 ms"), lines))
