"""Random walks through a grammar: texts that it accepts, without a model."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import xgrammar
from tiny_config import write_config
from tiny_tokenizer import write_tokenizer

from skiff_runtime.grammar.compiler.grammar_compiler import GrammarCompiler
from skiff_runtime.grammar.tokenizer_info import read_tokenizer_info
from skiff_runtime.messages import Grammar, GrammarKind
from skiff_runtime.models.config import read_model_config

MAX_TOKENS: Final = 300
HURRY_AFTER_TOKENS: Final = 40
"""A walk of more tokens closes strings, objects and lists, and ends, wherever the grammar allows it."""


class Walker:
    """Generates random texts that a grammar accepts, as a model with random weights would."""

    def __init__(self, directory: Path) -> None:
        write_config(directory)
        write_tokenizer(directory)
        self._vocabulary = read_tokenizer_info(read_model_config(directory))
        self._compiler = GrammarCompiler(self._vocabulary)
        self._token_bytes = self._vocabulary.decoded_vocab
        self._closing = [t for t, text in enumerate(self._token_bytes) if text in (b'"', b"}", b"]", b"null")]

    def texts(self, schema: object, seed: str, walks: int = 1) -> Iterator[str]:
        """Yield random texts under a JSON schema."""
        return self.walk(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), seed, walks)

    def walk(self, grammar: Grammar, seed: str, walks: int) -> Iterator[str]:
        """Yield the texts of the walks that ended. Raises ``InvalidRequest`` if the grammar cannot be compiled."""
        data = self._compiler.compile(grammar)
        compiled = xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._vocabulary)
        for number in range(walks):
            text = self._walk(compiled, random.Random(f"{seed} {number}"))
            if text is not None:
                yield text

    def _walk(self, grammar: xgrammar.CompiledGrammar, chance: random.Random) -> str | None:
        matcher = xgrammar.GrammarMatcher(grammar)
        mask = xgrammar.allocate_token_bitmask(1, len(self._token_bytes))
        data = b""
        for step in range(MAX_TOKENS):
            matcher.fill_next_token_bitmask(mask)
            bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: len(self._token_bytes)]).tolist()
            assert allowed, data
            ends = [token for token in self._closing if token in allowed]
            hurry = ends and chance.random() < (1.0 if step > HURRY_AFTER_TOKENS else 0.2)
            token = chance.choice(ends if hurry else allowed)
            if step > HURRY_AFTER_TOKENS:
                token = next((t for t in self._vocabulary.stop_token_ids if t in allowed), token)
            assert matcher.accept_token(token)
            if matcher.is_terminated():
                return data.decode(errors="replace")
            data += self._token_bytes[token]
        return None
