"""Grammars of parameters that are written one by one, in XML or as keyword arguments of Python.

Each returns None for a tool that the format cannot express with every constraint of its schema enforced; such a tool is
called in JSON instead.
"""

import json
import keyword
from collections.abc import Mapping
from typing import Any, Final

from skiff_runtime.api.parsing.parameter_types import STRING, find_types

TagFormat = dict[str, Any]
"""A part of a structural tag of xgrammar."""
_ROOT_KEYWORDS: Final = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id", "title", "description")
)  # fmt: skip
_ANNOTATIONS: Final = frozenset(
    ("type", "title", "description", "default", "examples", "$comment", "deprecated")
)
_LENGTHS: Final = {"minLength": 0, "maxLength": None}
_MAX_LENGTH: Final = 1000
"""Longer bounds of a string make too large a grammar."""
_MAX_COPIED_CHARACTERS: Final = 1 << 17
"""Definitions are copied for each parameter, and optional keyword arguments for each that the call can begin with."""
_DEFINITIONS: Final = ("$defs", "definitions")
_MAX_OPTIONAL_FIRST: Final = 8
"""Optional keyword arguments of a tool without required ones: the call can begin with each of them."""


def json_parameters(parameters: Mapping[str, Any]) -> TagFormat | None:
    """Return the format of one JSON object."""
    return {"type": "json_schema", "json_schema": parameters}


def xml_parameters(parameters: Mapping[str, Any]) -> TagFormat | None:
    """Return the format of ``<parameter=key>`` elements, each on lines of its own."""
    members = _split_members(parameters)
    if members is None:
        return None
    elements: list[TagFormat] = []
    for name, schema, is_required in members:
        value = _xml_value(schema, parameters)
        if value is None or any(character in name for character in "<>\n"):
            return None
        tag = {
            "type": "tag",
            "begin": f"<parameter={name}>\n",
            "content": value,
            "end": "</parameter>",
        }
        element = sequence([tag, constant("\n")])
        elements.append(element if is_required else {"type": "optional", "content": element})
    return sequence(elements)


def python_parameters(parameters: Mapping[str, Any]) -> TagFormat | None:
    """Return the format of keyword arguments whose values are literals in the spelling of JSON, required ones first."""
    members = _split_members(parameters)
    if members is None or any(not name.isidentifier() or keyword.iskeyword(name) for name, *_ in members):
        return None
    required = [_python_member(name, schema, parameters) for name, schema, needed in members if needed]
    optional = [_python_member(name, schema, parameters) for name, schema, needed in members if not needed]
    if required:
        rest = [sequence([constant(", "), member]) for member in required[1:]]
        return sequence([required[0], *rest, *_optional_rest(optional)])
    if len(optional) > _MAX_OPTIONAL_FIRST or len(json.dumps(optional)) > _MAX_COPIED_CHARACTERS:
        return None
    beginnings = [
        sequence([member, *_optional_rest(optional[index + 1 :])]) for index, member in enumerate(optional)
    ]
    return {"type": "optional", "content": any_of(beginnings)} if beginnings else sequence([])


def _split_members(parameters: Mapping[str, Any]) -> list[tuple[str, Any, bool]] | None:
    """Return name, schema and necessity of each parameter; None if the schema says more than these."""
    additional = parameters.get("additionalProperties")
    properties = parameters.get("properties", {} if additional is False else None)
    required = parameters.get("required", [])
    if (
        not isinstance(properties, Mapping)
        or not isinstance(required, list)
        or isinstance(additional, Mapping)
    ):
        return None
    if not parameters.keys() <= _ROOT_KEYWORDS or not all(name in properties for name in required):
        return None
    definitions = sum(len(json.dumps(parameters[name])) for name in _DEFINITIONS if name in parameters)
    if definitions * len(properties) > _MAX_COPIED_CHARACTERS:
        return None
    return [(name, schema, name in required) for name, schema in properties.items()]


def _xml_value(schema: Any, root: Mapping[str, Any]) -> TagFormat | None:
    """Return the format of a value and the newline after it, in which text has no quotation marks."""
    types = find_types(schema, root)
    if "string" not in types:
        return sequence([_json_value(schema, root), constant("\n")])
    if types != STRING or not isinstance(schema, Mapping):
        return None
    if isinstance(schema.get("enum"), list) and schema.keys() <= {*_ANNOTATIONS, "enum"}:
        values = [value for value in schema["enum"] if isinstance(value, str)]
        if not values or any("</" in value or value != value.strip() for value in values):
            return None
        return any_of([constant(value + "\n") for value in values])
    if schema.keys() <= _ANNOTATIONS:
        return {"type": "any_text"}
    return _bounded_text(schema) if schema.keys() <= {*_ANNOTATIONS, *_LENGTHS} else None


def _bounded_text(schema: Mapping[str, Any]) -> TagFormat | None:
    """Return the format of a line of a bounded length, and the newline after it."""
    shortest, longest = (schema.get(name, default) for name, default in _LENGTHS.items())
    if not isinstance(shortest, int) or not isinstance(longest, int | None):
        return None
    if shortest > _MAX_LENGTH or (longest or 0) > _MAX_LENGTH:
        return None
    pattern = f"[^<\\n]{{{shortest},{'' if longest is None else longest}}}"
    return sequence([{"type": "regex", "pattern": pattern}, constant("\n")])


def _json_value(schema: Any, root: Mapping[str, Any]) -> TagFormat:
    """Return the format of a JSON value of a subschema, with the definitions that its references need."""
    if isinstance(schema, Mapping) and "$ref" in json.dumps(schema):
        schema = {**schema, **{name: root[name] for name in _DEFINITIONS if name in root}}
    return {"type": "json_schema", "json_schema": schema}


def _python_member(name: str, schema: Any, root: Mapping[str, Any]) -> TagFormat:
    return sequence([constant(name + "="), _json_value(schema, root)])


def _optional_rest(members: list[TagFormat]) -> list[TagFormat]:
    return [{"type": "optional", "content": sequence([constant(", "), member])} for member in members]


def constant(text: str) -> TagFormat:
    return {"type": "const_string", "value": text}


def sequence(parts: list[TagFormat]) -> TagFormat:
    # xgrammar refuses an empty sequence.
    return {"type": "sequence", "elements": parts} if parts else constant("")


def any_of(formats: list[TagFormat]) -> TagFormat:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}
