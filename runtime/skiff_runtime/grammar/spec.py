"""Grammar specifications: convert the structured-output parameters of a request to ``messages.Grammar``.

Only the size is checked here. The compiler process checks and compiles the grammar later.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import Grammar, GrammarKind

MAX_SOURCE_BYTES: Final = 512 << 10


def json_object_grammar() -> Grammar:
    """Return the grammar of any JSON object."""
    return Grammar(GrammarKind.JSON)


def json_schema_grammar(schema: Any, param: str) -> Grammar:
    """Return the grammar of a JSON schema, which is an object or its JSON text."""
    source = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
    return _create(GrammarKind.JSON_SCHEMA, source, param)


def regex_grammar(pattern: str, param: str) -> Grammar:
    """Return the grammar of texts that a regular expression matches as a whole."""
    return _create(GrammarKind.REGEX, pattern, param)


def ebnf_grammar(source: str, param: str) -> Grammar:
    """Return a grammar that is given in EBNF (GBNF)."""
    return _create(GrammarKind.EBNF, source, param)


def choice_grammar(choices: Sequence[str], param: str) -> Grammar:
    """Return the grammar of a choice between texts."""
    return _create(GrammarKind.EBNF, "root ::= " + " | ".join(map(_quote, dict.fromkeys(choices))), param)


def structural_tag_grammar(tag_format: dict[str, Any], param: str) -> Grammar:
    """Return the grammar of ``tag_format``, a format of xgrammar's structural tags."""
    tag = {"type": "structural_tag", "format": tag_format}
    return _create(GrammarKind.STRUCTURAL_TAG, json.dumps(tag, ensure_ascii=False), param)


def check_structural_tag(tag_format: Any, param: str) -> None:
    """Raise ``InvalidRequest`` for a client's tag with an option of JSON that the lowering of schemas does not enforce."""
    pending = [tag_format]
    while pending:
        part = pending.pop()
        if isinstance(part, list):
            pending += part
        elif isinstance(part, dict) and part.get("type") == "json_schema":
            _check_tagged_schema(part, param)
        elif isinstance(part, dict):
            pending += part.values()


def _check_tagged_schema(part: dict[str, Any], param: str) -> None:
    if part.get("style", "json") != "json":
        raise InvalidRequest(f"'{param}': the only style of a JSON schema is \"json\"", param=param)
    for name in part:
        if name not in ("type", "json_schema", "style"):
            raise InvalidRequest(
                f"'{param}': {name[:64]!r} of a JSON schema is not supported; remove it", param=param
            )
    if "json_schema" not in part:
        raise InvalidRequest(f"'{param}': a part of the type json_schema needs 'json_schema'", param=param)


def to_structural_tag(grammar: Grammar) -> dict[str, Any]:
    """Convert a grammar to a format of structural tags, so that it can be combined with others.

    Raises ``InvalidRequest`` if it is a JSON schema that is not valid JSON.
    """
    match grammar.kind:
        case GrammarKind.JSON:
            return {"type": "json_schema", "json_schema": {"type": "object"}}
        case GrammarKind.JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": parse_schema(grammar.source)}
        case GrammarKind.REGEX:
            return {"type": "regex", "pattern": grammar.source}
        case GrammarKind.EBNF:
            return {"type": "grammar", "grammar": grammar.source}
    tag_format: dict[str, Any] = json.loads(grammar.source)["format"]
    return tag_format


def parse_schema(source: str) -> Any:
    """Parse the text of a JSON schema. Raises ``InvalidRequest``."""
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the JSON schema is not valid JSON: {error}", code="invalid_grammar") from None


def _create(kind: GrammarKind, source: str, param: str) -> Grammar:
    try:
        size = len(source.encode())
    except UnicodeEncodeError:
        raise InvalidRequest(
            f"'{param}' contains half of a UTF-16 surrogate pair; send valid Unicode", param=param
        ) from None
    if size > MAX_SOURCE_BYTES:
        raise InvalidRequest(
            f"'{param}' has {size} bytes, more than {MAX_SOURCE_BYTES}; use a smaller one", param=param
        )
    return Grammar(kind, source)


def _quote(text: str) -> str:
    """Return ``text`` as a literal of EBNF."""
    escaped = "".join(_ESCAPES.get(character, character) for character in text)
    return f'"{escaped}"'


_ESCAPES: Final = {chr(code): f"\\x{code:02x}" for code in (*range(0x20), 0x7F)} | {'"': '\\"', "\\": "\\\\"}
