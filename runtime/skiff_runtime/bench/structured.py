"""``skiff bench structured``: time per decode step to advance grammars and fill their token masks.

Row by row on one thread, and in batches on several, as the engine does. Every way takes the same seeded walks through a
JSON schema's grammar, and the masks of all ways must be equal. Neither a model nor a GPU is needed: masks are filled on
the host, beside the forward pass, and hold up a step only where they take longer than it.
"""

import argparse
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import numpy as np
from rich.console import Console

from skiff_runtime.bench import report
from skiff_runtime.bench.values import natural_int, positive_int
from skiff_runtime.contract import EXIT_OK
from skiff_runtime.errors import SkiffError
from skiff_runtime.grammar.library import xgrammar
from skiff_runtime.grammar.matcher import BatchFollower, Follower
from skiff_runtime.grammar.vocabulary import read_vocabulary
from skiff_runtime.models.config import read_model_config
from skiff_runtime.progress import Counter
from skiff_runtime.step import Int32

EPILOG: Final = """\
examples:
  skiff bench structured                                   1, 32 and 256 rows of 151,936 tokens
  skiff bench structured --model /models/qwen3-8b --rows 256 --threads 1,4,8
"""
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["person", "company", "ship"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "maxLength": 40},
                "code": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "code"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "tags", "address"],
    "additionalProperties": False,
}
"""Strings, where nearly every token may follow, beside enums and digits, where few may."""

Advance = Callable[[Sequence[Follower], Sequence[int], Sequence[int]], None]
"""Goes on with one token of each follower; the slots of their masks are in the middle."""


@dataclass(frozen=True, slots=True)
class Result:
    """Milliseconds per step over all ``steps`` of one way; ``threads`` 0: row by row."""

    rows: int
    threads: int
    steps: int
    median_ms: float
    p99_ms: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.epilog = EPILOG
    counts = "%(default)s"
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
    parser.add_argument("--steps", type=positive_int, default=64, metavar="N", help=f"default: {counts}")
    parser.add_argument(
        "--vocab-size",
        type=positive_int,
        default=151_936,
        metavar="N",
        help="tokens of a made-up vocabulary of syllables, digits and signs; at least 512 (default: %(default)s)",
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="use the vocabulary of this model instead")
    parser.add_argument("--seed", type=natural_int, default=0, metavar="N", help=f"default: {counts}")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write all figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure, show and write the figures; the exit code."""
    vocabulary = (
        made_up_vocabulary(max(512, arguments.vocab_size), arguments.seed)
        if arguments.model is None
        else read_vocabulary(read_model_config(arguments.model))
    )
    compiler = xgrammar.GrammarCompiler(vocabulary)
    grammar = compiler.compile_json_schema(json.dumps(SCHEMA), any_whitespace=False)
    cores = len(os.sched_getaffinity(0))
    ways = (0, *(arguments.threads or [each for each in (1, 2, 4, 8) if each <= cores]))
    results = []
    with Counter("structured", len(arguments.rows) * len(ways) * arguments.steps) as counter:
        for rows in arguments.rows:
            walks = [
                _measure(grammar, rows, threads, arguments, lambda: counter.advance(done=1))
                for threads in ways
            ]
            if any(checksum != walks[0][1] for _, checksum in walks):
                raise SkiffError(f"masks of {rows} rows differ between the ways of filling them")
            results += [result for result, _ in walks]
    _show(results, vocabulary.vocab_size, cores)
    if arguments.output is not None:
        figures: dict[str, Any] = {
            "benchmark": "structured",
            "vocabulary": vocabulary.vocab_size,
            "cores": cores,
        }
        report.write(arguments.output, {**figures, "runs": [asdict(each) for each in results]})
    return EXIT_OK


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


def _measure(
    grammar: xgrammar.CompiledGrammar,
    rows: int,
    threads: int,
    arguments: argparse.Namespace,
    on_step: Callable[[], object],
) -> tuple[Result, int]:
    """The times of one way, and a checksum of all masks that it filled."""
    masks = np.zeros((rows, -(-grammar.tokenizer_info.vocab_size // 32)), np.int32)
    followers = [_opened(grammar, mask) for mask in masks]
    advance: Advance = BatchFollower(masks, threads).follow if threads else _row_by_row
    generator = np.random.default_rng(arguments.seed)
    seconds, checksum = [], 0
    for _ in range(arguments.steps):
        tokens = [_walk(mask, generator) for mask in masks]
        started = perf_counter()
        advance(followers, range(rows), tokens)
        seconds.append(perf_counter() - started)
        for row, follower in enumerate(followers):
            if not follower.bound:  # its answer has ended: another begins
                followers[row] = _opened(grammar, masks[row])
        checksum = hash((checksum, masks.tobytes()))
        on_step()
    times = 1e3 * np.array(seconds)
    return Result(
        rows, threads, len(times), float(np.median(times)), float(np.percentile(times, 99))
    ), checksum


def _opened(grammar: xgrammar.CompiledGrammar, mask: Int32) -> Follower:
    follower = Follower(grammar, mask)
    follower.fill()
    return follower


def _row_by_row(followers: Sequence[Follower], slots: Sequence[int], tokens: Sequence[int]) -> None:
    for follower, token in zip(followers, tokens, strict=True):
        follower.follow((token,))


def _walk(mask: Int32, generator: np.random.Generator) -> int:
    """One of the tokens that the mask admits."""
    admitted = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(generator.choice(admitted))


def _counts(text: str) -> tuple[int, ...]:
    return tuple(positive_int(each) for each in text.split(","))


def _show(results: Sequence[Result], vocab_size: int, cores: int) -> None:
    console = Console(highlight=False)
    console.print(f"{vocab_size:,} tokens, {cores} cores; accepting a token and filling the mask of each row")
    lines = [
        (
            str(each.rows),
            f"batch, {each.threads} threads" if each.threads else "row by row",
            f"{each.median_ms:.3f}",
            f"{each.p99_ms:.3f}",
        )
        for each in results
    ]
    console.print(report.table(("rows", "way", "median ms", "p99 ms"), lines))
