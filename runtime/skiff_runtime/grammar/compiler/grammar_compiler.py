"""A grammar compiled for the model's vocabulary, by xgrammar. Runs in the compiler process alone.

Whatever xgrammar only warns of would be a promise not kept, so a warning is a refusal.
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
from skiff_runtime.grammar.schema.ebnf import corrected
from skiff_runtime.grammar.schema.lowering import lower
from skiff_runtime.grammar.tokenizer_info import read_tokenizer_info
from skiff_runtime.messages import Grammar, GrammarKind
from skiff_runtime.processes.launch import Launch

MAX_THREADS: Final = 8
MAX_WHITESPACE: Final = 16
"""Most blanks and line ends between two parts of JSON: without a limit, weak models write nothing else to the end."""
_MAX_REASON_CHARACTERS: Final = 400
_NOISE: Final = re.compile(r"\[\d\d:\d\d:\d\d\] \S+?:\d+: ")
_WARNING: Final = re.compile(r"Warning: (.*)")
_ANY_OBJECT: Final = {"type": "object"}
_STDERR: Final = 2


class GrammarCompiler:
    """Compiles for one model."""

    def __init__(self, vocabulary: xgrammar.TokenizerInfo) -> None:
        self._compiler = xgrammar.GrammarCompiler(
            vocabulary, max_threads=min(MAX_THREADS, len(os.sched_getaffinity(0))), cache_enabled=False
        )

    def compile(self, grammar: Grammar) -> bytes:
        """xgrammar's serialized form. Raises ``InvalidRequest`` with the reason why there is none."""
        try:
            with _warnings() as warnings:
                data = self._compiled(grammar).serialize_json().encode()
        except (RuntimeError, ValueError, TypeError, RecursionError) as error:
            raise InvalidRequest(f"the grammar cannot be compiled: {_reason(str(error))}") from None
        if warnings:
            raise InvalidRequest(f"the grammar cannot be enforced: {_reason(warnings[0])}")
        return data

    def _compiled(self, grammar: Grammar) -> xgrammar.CompiledGrammar:
        match grammar.kind:
            case GrammarKind.JSON:
                return self._compiler.compile_grammar(schema_to_ebnf(_ANY_OBJECT))
            case GrammarKind.JSON_SCHEMA:
                return self._compiler.compile_grammar(schema_to_ebnf(_parsed(grammar.source)))
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(grammar.source)
            case GrammarKind.EBNF:
                return self._compiler.compile_grammar(grammar.source)
        return self._compiler.compile_structural_tag(json.dumps(_prepared(_parsed(grammar.source))))


def load_compiler(launch: Launch) -> GrammarCompiler:
    """The compiler for a service's model. Raises ``ModelError``."""
    return GrammarCompiler(read_tokenizer_info(launch.model))


def schema_to_ebnf(schema: object) -> str:
    """The EBNF of a JSON schema. Raises ``InvalidRequest`` or what xgrammar raises."""
    source = json.dumps(lower(schema), ensure_ascii=False)
    grammar = xgrammar.Grammar.from_json_schema(source, strict_mode=False, max_whitespace_cnt=MAX_WHITESPACE)
    return corrected(str(grammar))


def _prepared(tag: Any) -> Any:
    """A structural tag whose schemas are EBNF."""
    if isinstance(tag, list):
        return [_prepared(part) for part in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") == "json_schema":
        return {"type": "grammar", "grammar": schema_to_ebnf(tag["json_schema"])}
    return {name: _prepared(part) for name, part in tag.items()}


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema is no valid JSON: {error}") from None


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What xgrammar warns of in the block; its C++ writes that to the process's standard error."""
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


def _reason(text: str) -> str:
    plain = " ".join(_NOISE.sub("", text).split())
    return plain if len(plain) <= _MAX_REASON_CHARACTERS else plain[:_MAX_REASON_CHARACTERS] + "..."
