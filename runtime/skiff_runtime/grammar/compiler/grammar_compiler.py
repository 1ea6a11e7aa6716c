"""Grammar compiler: compiles grammars for the model's vocabulary by xgrammar. Used by the compiler process alone.

xgrammar warns of some constructs that it then ignores. An ignored constraint would break a promise to the client, so
every warning is a refusal.
"""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import xgrammar

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.schema.ebnf import schema_to_ebnf
from skiff_runtime.grammar.spec import parse_schema
from skiff_runtime.grammar.tokenizer_info import read_tokenizer_info
from skiff_runtime.messages import Grammar, GrammarKind
from skiff_runtime.processes.launch import Launch

MAX_THREADS: Final = 8
_MAX_REASON_CHARACTERS: Final = 400
_LOG_PREFIX: Final = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")
_WARNING: Final = re.compile(r"Warning: (.*)")
_ANY_OBJECT: Final = {"type": "object"}
_STDERR: Final = 2


class GrammarCompiler:
    """Compiles grammars for one vocabulary."""

    def __init__(self, vocabulary: xgrammar.TokenizerInfo) -> None:
        # No cache here: the tokenizer process has one, and this process may be killed at any time.
        self._compiler = xgrammar.GrammarCompiler(
            vocabulary, max_threads=min(MAX_THREADS, len(os.sched_getaffinity(0))), cache_enabled=False
        )

    def compile(self, grammar: Grammar) -> bytes:
        """Compile to xgrammar's serialized form. Raises ``InvalidRequest`` with the reason if that fails."""
        try:
            with _capture_warnings() as warnings:
                data = self._compile(grammar).serialize_json().encode()
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"the grammar cannot be compiled: {_shorten(str(error))}") from None
        if warnings:
            raise InvalidRequest(f"the grammar cannot be enforced: {_shorten(warnings[0])}")
        return data

    def _compile(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        match grammar.kind:
            case GrammarKind.JSON:
                return self._compiler.compile_grammar(schema_to_ebnf(_ANY_OBJECT))
            case GrammarKind.JSON_SCHEMA:
                return self._compiler.compile_grammar(schema_to_ebnf(parse_schema(grammar.source)))
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(grammar.source)
            case GrammarKind.EBNF:
                return self._compiler.compile_grammar(grammar.source)
        return self._compiler.compile_structural_tag(json.dumps(_replace_schemas(json.loads(grammar.source))))


def load_compiler(launch: Launch) -> GrammarCompiler:
    """Create the compiler for the vocabulary of a service's model. Raises ``ModelError``."""
    return GrammarCompiler(read_tokenizer_info(launch.model))


def _replace_schemas(tag: Any) -> Any:
    """Return a structural tag with each JSON schema in it replaced by EBNF.

    xgrammar would compile the schemas itself, without the lowering that makes it enforce all of them.
    """
    if isinstance(tag, list):
        return [_replace_schemas(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema":
        return {"type": "grammar", "grammar": schema_to_ebnf(tag["json_schema"])}
    return {name: _replace_schemas(part) for name, part in tag.items()}


@contextmanager
def _capture_warnings() -> Iterator[list[str]]:
    """Yield a list that holds xgrammar's warnings after the block.

    Its C++ code writes them to the standard error of the process, which is redirected to a file meanwhile.
    """
    found: list[str] = []
    saved = os.dup(_STDERR)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), _STDERR)
        try:
            yield found
        finally:
            os.dup2(saved, _STDERR)
            os.close(saved)
            file.seek(0)
            found += _WARNING.findall(file.read(1 << 20).decode(errors="replace"))


def _shorten(text: str) -> str:
    plain = " ".join(_LOG_PREFIX.sub("", text).split())
    return plain if len(plain) <= _MAX_REASON_CHARACTERS else plain[:_MAX_REASON_CHARACTERS] + "..."
