"""What a request says of its answer's form, as a grammar: bounded here, checked and compiled later."""

import json
from collections.abc import Sequence
from typing import Any, Final

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import Grammar, GrammarKind

MAX_SOURCE_BYTES: Final = 512 << 10


def json_object_grammar() -> Grammar:
    """Any JSON object."""
    return Grammar(GrammarKind.JSON)


def json_schema_grammar(schema: Any, param: str) -> Grammar:
    """What a JSON schema describes; ``schema`` is an object, or its JSON text."""
    source = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return _bounded(GrammarKind.JSON_SCHEMA, source, param)


def regex_grammar(pattern: str, param: str) -> Grammar:
    """Text that a regular expression matches as a whole."""
    return _bounded(GrammarKind.REGEX, pattern, param)


def ebnf_grammar(source: str, param: str) -> Grammar:
    """Text of a grammar in GBNF."""
    return _bounded(GrammarKind.EBNF, source, param)


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """One of several texts."""
    return _bounded(GrammarKind.EBNF, "root ::= " + " | ".join(map(_quoted, dict.fromkeys(choices))), param)


def structural_tag_grammar(form: dict[str, Any], param: str) -> Grammar:
    """Text in a format of xgrammar's structural tags."""
    tag = {"type": "structural_tag", "format": form}
    return _bounded(GrammarKind.STRUCTURAL_TAG, json.dumps(tag, ensure_ascii=False), param)


def to_structural_tag(grammar: Grammar) -> dict[str, Any]:
    """A grammar as a part of a structural tag."""
    match grammar.kind:
        case GrammarKind.JSON:
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": _parsed(grammar.source)}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.source}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.source}
    form: dict[str, Any] = json.loads(grammar.source)["format"]
    return form


def _parsed(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema is no valid JSON: {error}", code="invalid_grammar") from None


def _bounded(kind: GrammarKind, source: str, param: str) -> Grammar:
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"'{param}' holds half of a UTF-16 surrogate pair; send valid Unicode", param=param
        ) from None
    if size > MAX_SOURCE_BYTES:
        raise InvalidRequest(
            f"'{param}' has {size} bytes, more than {MAX_SOURCE_BYTES}; use a smaller one", param=param
        )
    return Grammar(kind, source)


def _quoted(text: str) -> str:
    """A literal of GBNF."""
    escaped = "".join(_ESCAPES.get(character, character) for character in text)
    return f'"{escaped}"'


_ESCAPES: Final = {chr(code): f"\\x{code:02x}" for code in (*range(0x20), 0x7F)} | {'"': '\\"', "\\": "\\\\"}
