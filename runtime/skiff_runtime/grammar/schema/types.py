"""Strings, numbers, arrays and enumerated values of a JSON schema: checks their keywords and lowers them."""

import math
from collections.abc import Callable
from typing import Any, Final

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.schema.pattern import ANY_CHARACTER, check_pattern

MAX_COUNT: Final = 100_000
MAX_EXACT_INTEGER: Final = 1 << 53
MAX_MULTIPLE: Final = 1000
MAX_PATTERN_LENGTH: Final = 1000
"""For longer strings, xgrammar's counted repetition is cheaper than an automaton."""

TYPE_KEYWORDS: Final[dict[str, frozenset[str]]] = {
    "object": frozenset(
        {
            "additionalProperties",
            "maxProperties",
            "minProperties",
            "patternProperties",
            "properties",
            "propertyNames",
            "required",
        }
    ),
    "array": frozenset({"items", "maxItems", "minItems", "prefixItems"}),
    "string": frozenset({"format", "maxLength", "minLength", "pattern"}),
    "number": frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"}),
    "integer": frozenset({"exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum", "multipleOf"}),
    "boolean": frozenset(),
    "null": frozenset(),
}
"""The types of JSON, each with the keywords that constrain it."""

FORMATS: Final = frozenset(
    {
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "json-pointer",
        "relative-json-pointer",
        "time",
        "uri",
        "uri-reference",
        "uri-template",
        "uuid",
    }
)
"""Formats that are enforced, by their syntax only: 2025-02-31 is a date."""

Schema = dict[str, Any]
LowerSchema = Callable[[object, str], Schema]
"""(schema, location) -> the lowered schema. The location is a JSON pointer, for errors."""


def lower_string(keywords: Schema, location: str) -> Schema:
    """Lower the schema of a string."""
    lengths = [keyword for keyword in ("maxLength", "minLength") if keyword in keywords]
    chosen = [*(keyword for keyword in ("pattern", "format") if keyword in keywords), *lengths[:1]]
    if len(chosen) > 1:
        raise InvalidRequest(
            f"'{chosen[0]}' and '{chosen[1]}' of the JSON schema at {location} cannot both be enforced; keep one"
        )
    if "pattern" in keywords:
        pattern = check_pattern(keywords["pattern"], f"'pattern' of the JSON schema at {location}")
        return {"type": "string", "pattern": pattern}
    if "format" in keywords:
        if not isinstance(keywords["format"], str) or keywords["format"] not in FORMATS:
            raise InvalidRequest(
                f"'format' of the JSON schema at {location} is not supported; known are {', '.join(sorted(FORMATS))}"
            )
        return {"type": "string", "format": keywords["format"]}
    return {"type": "string", **_lower_lengths(keywords, location)}


def _lower_lengths(keywords: Schema, location: str) -> Schema:
    low = read_count(keywords, "minLength", location)
    high = read_count(keywords, "maxLength", location, MAX_COUNT)
    if low > high:
        raise InvalidRequest(f"'minLength' exceeds 'maxLength' in the JSON schema at {location}")
    longest = high if "maxLength" in keywords else low
    if longest > MAX_PATTERN_LENGTH:
        return {keyword: read_count(keywords, keyword, location) for keyword in keywords}
    # As a pattern, lengths compile to a tenth of the size.
    if "maxLength" in keywords:
        return {"pattern": f"^{ANY_CHARACTER}{{{low},{high}}}$"}
    return {"pattern": f"^{ANY_CHARACTER}{{{low},}}$"} if low else {}


def lower_number(kind: str, keywords: Schema, location: str) -> Schema:
    """Lower the schema of a number or an integer."""
    for keyword, value in keywords.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidRequest(f"'{keyword}' of the JSON schema at {location} must be a number")
        if abs(value) > MAX_EXACT_INTEGER:
            raise InvalidRequest(
                f"'{keyword}' of the JSON schema at {location} is beyond 2**53, where numbers are not exact"
            )
    bounds = (
        _integer_bounds(keywords)
        if kind == "integer"
        else {keyword: value for keyword, value in keywords.items() if keyword != "multipleOf"}
    )
    if "multipleOf" not in keywords:
        return {"type": kind, **bounds}
    step = keywords["multipleOf"]
    if kind != "integer" or bounds or step != int(step) or not 1 <= step <= MAX_MULTIPLE:
        raise InvalidRequest(
            f"'multipleOf' of the JSON schema at {location} is supported for integers without bounds, "
            f"and from 1 to {MAX_MULTIPLE}; remove it"
        )
    return {"type": kind, "multipleOf": int(step)}


def _integer_bounds(keywords: Schema) -> Schema:
    bounds: Schema = {}
    lows = [math.ceil(keywords["minimum"])] if "minimum" in keywords else []
    lows += [math.floor(keywords["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in keywords else []
    highs = [math.floor(keywords["maximum"])] if "maximum" in keywords else []
    highs += [math.ceil(keywords["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in keywords else []
    if lows:
        bounds["minimum"] = max(lows)
    if highs:
        bounds["maximum"] = min(highs)
    return bounds


def lower_array(keywords: Schema, location: str, lower: LowerSchema) -> Schema:
    """Lower the schema of an array. After ``prefixItems``, only items that ``items`` describes are allowed."""
    prefix = keywords.get("prefixItems", [])
    if not isinstance(prefix, list) or isinstance(keywords.get("items"), list):
        raise InvalidRequest(
            f"'prefixItems' of the JSON schema at {location} must be a list of schemas, and 'items' one schema"
        )
    low = read_count(keywords, "minItems", location)
    high = read_count(keywords, "maxItems", location, MAX_COUNT)
    rest = keywords.get("items", not prefix)
    prefix = prefix[:high] if "maxItems" in keywords else prefix
    if rest is False or ("maxItems" in keywords and high <= len(prefix)):
        rest, high = False, min(high, len(prefix))
    if low > high:
        raise InvalidRequest(f"'minItems' exceeds the items that the JSON schema at {location} allows")
    found: Schema = {"type": "array", "minItems": low}
    if prefix:
        found["prefixItems"] = [lower(item, f"{location}/prefixItems/{i}") for i, item in enumerate(prefix)]
    if rest is False and not prefix:
        return {"type": "array", "maxItems": 0}
    found["items"] = False if rest is False else lower(rest, f"{location}/items")
    if rest is not False and "maxItems" in keywords:
        found["maxItems"] = high
    return found


def select_enum_values(node: Schema, location: str) -> list[Any]:
    """Return the values of ``enum`` or ``const`` that the schema's ``type`` allows."""
    for keyword in node:
        if keyword not in ("enum", "const", "type"):
            raise InvalidRequest(
                f"'{keyword}' beside 'enum' or 'const' in the JSON schema at {location} is not supported; remove it"
            )
    values = node.get("enum", [node.get("const")])
    if not isinstance(values, list) or not values:
        raise InvalidRequest(f"'enum' of the JSON schema at {location} must be a non-empty list of values")
    if "enum" in node and "const" in node:
        values = [value for value in values if is_same_value(value, node["const"])]
    kinds = node.get("type", list(TYPE_KEYWORDS))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    fitting = [value for value in values if any(has_type(value, kind) for kind in kinds)]
    if not fitting:
        raise InvalidRequest(
            f"no value of 'enum' or 'const' in the JSON schema at {location} has the required type"
        )
    for value in fitting:
        _check_exact(value, location)
    return fitting


def read_count(keywords: Schema, keyword: str, location: str, default: int = 0) -> int:
    """Return the value of ``keyword``, which must be a whole number from 0 to ``MAX_COUNT``."""
    value = keywords.get(keyword, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != int(value)
        or not 0 <= value <= MAX_COUNT
    ):
        raise InvalidRequest(
            f"'{keyword}' of the JSON schema at {location} must be a whole number from 0 to {MAX_COUNT}"
        )
    return int(value)


def has_type(value: Any, kind: Any) -> bool:
    """Return True if ``value`` has the JSON type ``kind``."""
    match value:
        case bool():
            return bool(kind == "boolean")
        case None:
            return bool(kind == "null")
        case int():
            return kind in ("integer", "number")
        case float():
            return kind == "number" or (kind == "integer" and value.is_integer())
        case str():
            return bool(kind == "string")
        case list():
            return bool(kind == "array")
    return bool(kind == "object")


def is_same_value(one: Any, other: Any) -> bool:
    """Return True if both are the same JSON value. (In Python, True == 1.)"""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _check_exact(value: Any, location: str) -> None:
    """Raise ``InvalidRequest`` if a number in ``value`` would not be written exactly."""
    if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) <= MAX_EXACT_INTEGER):
        raise InvalidRequest(
            f"a number of 'enum' or 'const' in the JSON schema at {location} is beyond 2**53; use a smaller one"
        )
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_exact(part, location)
