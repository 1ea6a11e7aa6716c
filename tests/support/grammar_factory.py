"""Compiles grammars for a small model in the test's own process."""

import json
from pathlib import Path

import xgrammar

from skiff_runtime.grammar.tokenizer_info import read_tokenizer_info
from skiff_runtime.messages import CompiledGrammar
from skiff_runtime.models.config import read_model_config


class GrammarFactory:
    """Compiles grammars for the model in ``path`` and decodes its tokens."""

    def __init__(self, path: Path) -> None:
        self.vocabulary = read_tokenizer_info(read_model_config(path))
        self.compiler = xgrammar.GrammarCompiler(self.vocabulary, max_threads=1)
        self._token_bytes = self.vocabulary.decoded_vocab

    def regex(self, pattern: str) -> CompiledGrammar:
        compiled = self.compiler.compile_regex(pattern)
        return CompiledGrammar(pattern.encode(), compiled.serialize_json().encode())

    def schema(self, schema: object) -> CompiledGrammar:
        source = json.dumps(schema)
        compiled = self.compiler.compile_json_schema(source, any_whitespace=False)
        return CompiledGrammar(source.encode(), compiled.serialize_json().encode())

    def written(self, tokens: list[int]) -> bytes:
        """Return the bytes of ordinary tokens."""
        return b"".join(self._token_bytes[token] for token in tokens)
