"""JSON types of a tool's parameters, for formats that write each parameter by itself instead of one JSON object."""

import ast
import json
import warnings
from collections.abc import Iterable, Mapping
from typing import Any, Final

ANY: Final = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
STRING: Final = frozenset(("string",))
_MAX_NODES: Final = 200
"""Subschemas, counted each time they are read; a type that needs more of them is left open."""
_MAX_WORD_CHARACTERS: Final = 4096
_MAX_PYTHON_CHARACTERS: Final = 1 << 16
_PYTHON_WORDS: Final[dict[str, Any]] = {
    "True": True, "TRUE": True, "False": False, "FALSE": False, "None": None,
}  # fmt: skip
_INVALID: Final = object()


def find_types(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types of the values that ``schema`` allows; ``root`` is the schema that its references refer to."""
    return _TypeFinder(root).find(schema)


class _TypeFinder:
    """Finds types in at most ``_MAX_NODES`` subschemas, because references to each other could make them endless."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._nodes_left = _MAX_NODES

    def find(self, schema: Any) -> frozenset[str]:
        self._nodes_left -= 1
        if not isinstance(schema, Mapping) or self._nodes_left < 0:
            return ANY
        found = ANY
        match schema.get("type"):
            case str(name):
                found = frozenset((name,))
            case [*names] if names:
                found = frozenset(name for name in names if isinstance(name, str))
        if isinstance(schema.get("enum"), list):
            found &= _types_of(schema["enum"])
        if "const" in schema:
            found &= _types_of([schema["const"]])
        for keyword in ("anyOf", "oneOf"):
            if isinstance(schema.get(keyword), list):
                found &= frozenset().union(*map(self.find, schema[keyword]))
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            found &= self.find(part)
        if "$ref" in schema:
            found &= self.find(_resolve(schema["$ref"], self._root))
        return found


def _types_of(values: Iterable[Any]) -> frozenset[str]:
    """Return the types of ``values``; an integer is a number as well."""
    found: set[str] = set()
    for value in values:
        match value:
            case None:
                found.add("null")
            case bool():
                found.add("boolean")
            case int():
                found |= {"integer", "number"}
            case float():
                found.add("number")
            case str():
                found.add("string")
            case list():
                found.add("array")
            case dict():
                found.add("object")
    return frozenset(found)


def _resolve(reference: Any, root: Mapping[str, Any]) -> Any:
    """Return the target of a reference into ``root``, None where there is none."""
    target: Any = root
    for key in str(reference).removeprefix("#").strip("/").split("/"):
        target = target.get(key) if isinstance(target, Mapping) and key else None
    return target


def to_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a parameter that a model wrote as plain ``text``: of the first type that fits, else a string.

    A model may write JSON or a literal of Python, such as ``True``.
    """
    value = _INVALID if types == STRING else parse_literal(text)
    if value is not _INVALID and not isinstance(value, str):  # quotation marks belong to a plain string
        if isinstance(value, float) and "number" not in types and value.is_integer():
            value = int(value)
        if _types_of([value]) & types:
            return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def parse_literal(text: str) -> Any:
    """Return the value of a literal of JSON or Python that JSON can express; ``_INVALID`` for other text."""
    text = text.strip()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = _PYTHON_WORDS.get(text, _INVALID)
        if value is _INVALID:
            value = _parse_python(text)
    return value if _is_json(value) else _INVALID


def word_to_json(word: str) -> str | None:
    """Return the JSON of a number or a constant, in the spelling of Python or JSON; None for any other word."""
    if len(word) > _MAX_WORD_CHARACTERS:
        return None
    value = parse_literal(word)
    if not isinstance(value, bool | int | float | None):
        return None
    return json.dumps(value)


def _parse_python(text: str) -> Any:
    if len(text) > _MAX_PYTHON_CHARACTERS:
        return _INVALID
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences
            return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _INVALID


def _is_json(value: Any) -> bool:
    """Return whether JSON can express ``value``. Python's parsers accept NaN and Infinity at any depth."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return False
    return True
