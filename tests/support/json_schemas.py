"""Two hundred JSON schemas, generated systematically: every leaf by itself, then every frame around several leaves."""

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, Final

Schema = dict[str, Any]
COUNT: Final = 200

LEAVES: Final[dict[str, Schema]] = {
    "any": {},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "string": {"type": "string"},
    "short string": {"type": "string", "maxLength": 5},
    "long string": {"type": "string", "minLength": 3, "maxLength": 12},
    "non-empty string": {"type": "string", "minLength": 1},
    "empty string": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"},
    "unanchored pattern": {"type": "string", "pattern": "ab+c?"},
    "pattern of classes": {"type": "string", "pattern": "^\\w[^x\\d]?\\s?$"},
    "alternatives": {"type": "string", "pattern": "^(red|gre+n|b[lu]{2}e)$"},
    "date": {"type": "string", "format": "date"},
    "time of day": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email"},
    "integer": {"type": "integer"},
    "small integer": {"type": "integer", "minimum": 0, "maximum": 9},
    "range": {"type": "integer", "minimum": -17, "maximum": 1234},
    "open range": {"type": "integer", "exclusiveMinimum": 99},
    "below": {"type": "integer", "exclusiveMaximum": -5},
    "fractional bounds": {"type": "integer", "minimum": 1.5, "maximum": 4.5},
    "multiple": {"type": "integer", "multipleOf": 7},
    "number": {"type": "number"},
    "number range": {"type": "number", "minimum": 0.5, "maximum": 2.25},
    "negative number": {"type": "number", "exclusiveMaximum": 0},
    "probability": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "bound without type": {"minimum": 3},
    "mixed words without type": {"minLength": 2, "maximum": 5, "required": ["a"]},
    "enum": {"enum": ["red", "green", "blue"]},
    "enum of letters": {"enum": ['a"b', "c\\d", "e\nf", "ü/東"]},
    "enum of types": {"enum": [1, "1", None, True, 2.5, [1, 2], {"a": None}]},
    "enum within type": {"type": ["integer", "null"], "enum": [1, "x", None]},
    "const": {"const": {"kind": "fixed", "at": [1, 2, {"x": "y"}]}},
    "types": {"type": ["string", "integer", "null"], "maxLength": 3, "minimum": 10},
    "any object": {"type": "object"},
    "any array": {"type": "array"},
    "union": {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 4}, {"type": "null"}]},
    "one of": {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0}]},
}

FRAMES: Final[dict[str, Callable[[Schema, Schema], Schema]]] = {
    "required": lambda a, b: {"type": "object", "properties": {"a": a, "b": b}, "required": ["a", "b"], "additionalProperties": False},
    "optional": lambda a, b: {"type": "object", "properties": {"a": a, "b": b, "c": a}, "required": ["b"]},
    "undeclared": lambda a, b: {"type": "object", "properties": {"a": a}, "required": ["z", "a"], "additionalProperties": b},
    "open": lambda a, b: {"type": "object", "properties": {"a": a, "ab": a}, "additionalProperties": b},
    "counted": lambda a, b: {"type": "object", "properties": {"a": a, "b": b, "c": b}, "additionalProperties": False, "minProperties": 1, "maxProperties": 2},
    "patterns": lambda a, b: {"type": "object", "patternProperties": {"^x[0-9]+$": a, "^y_": b}, "additionalProperties": False},
    "names": lambda a, b: {"type": "object", "propertyNames": {"pattern": "^[a-c]{1,3}$"}, "additionalProperties": a, "maxProperties": 3},
    "named by enum": lambda a, b: {"type": "object", "propertyNames": {"enum": ["left", "right"]}, "additionalProperties": b, "minProperties": 1},
    "list": lambda a, b: {"type": "array", "items": a, "minItems": 1, "maxItems": 3},
    "tuple": lambda a, b: {"type": "array", "prefixItems": [a, b], "items": False, "minItems": 2},
    "tuple and more": lambda a, b: {"type": "array", "prefixItems": [a], "items": b, "minItems": 1, "maxItems": 4},
    "nested": lambda a, b: {"type": "object", "properties": {"deep": {"type": "object", "properties": {"list": {"type": "array", "items": {"type": "object", "properties": {"leaf": a}, "required": ["leaf"]}, "maxItems": 2}}, "required": ["list"]}, "other": b}, "required": ["deep"]},
    "reference": lambda a, b: {"type": "object", "properties": {"one": {"$ref": "#/$defs/leaf"}, "two": {"$ref": "#/$defs/leaf", "description": "the same"}}, "required": ["one"], "$defs": {"leaf": {"anyOf": [a, b]}}},
    "tree": lambda a, b: {"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"value": a, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}}, "required": ["value"]}}},
    "linked list": lambda a, b: {"type": "object", "properties": {"head": a, "tail": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["head", "tail"]},
    "all of": lambda a, b: {"allOf": [{"type": "object", "properties": {"a": a}, "required": ["a"]}, {"properties": {"b": b}}]},
    "tagged": lambda a, b: {"oneOf": [_tagged("one", a), _tagged("two", b)]},
    "shared": lambda a, b: {"type": "object", "properties": {"a": a, "b": b}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "nullable": lambda a, b: {"type": "object", "properties": {"maybe": {"anyOf": [{"type": "array", "items": a, "maxItems": 2}, {"type": "null"}]}}, "required": ["maybe"], "title": "T", "description": "d"},
    "matrix": lambda a, b: {"type": "array", "items": {"type": "array", "items": a, "minItems": 2, "maxItems": 2}, "minItems": 1, "maxItems": 2},
}  # fmt: skip


def varied_schemas() -> dict[str, Schema]:
    """Return the schemas by name, the same each time."""
    return dict(islice(_all(), COUNT))


def _all() -> Iterator[tuple[str, Schema]]:
    yield from LEAVES.items()
    leaves = list(LEAVES.items())
    for turn in count():
        for number, (name, frame) in enumerate(FRAMES.items()):
            index = turn * len(FRAMES) + number
            first, a = leaves[(index + turn) % len(leaves)]
            second, b = leaves[(3 * index + 5 * turn + 1) % len(leaves)]
            yield f"{name} of {first} and {second}", frame(a, b)


def _tagged(tag: str, schema: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"tag": {"const": tag}, "value": schema},
        "required": ["tag", "value"],
        "additionalProperties": False,
    }
