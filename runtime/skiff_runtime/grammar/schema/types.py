"""Strings, numbers, arrays and lists of values of a JSON schema, each word of them checked."""

import math
from collections.abc import Callable
from typing import Any, Final

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.schema.pattern import ANY_CHARACTER, check_pattern

MAX_COUNT: Final = 100_000
MAX_EXACT_INTEGER: Final = 1 << 53
MAX_MULTIPLE: Final = 1000
MAX_PATTERN_LENGTH: Final = 1000
"""Beyond, xgrammar's counted repetition is cheaper than an automaton."""

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
"""The types of JSON, and the words that constrain each."""

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
"""Formats whose syntax is enforced (not the calendar: 2025-02-31 is a date)."""

Schema = dict[str, Any]
Lower = Callable[[object, str], Schema]


def lower_string(words: Schema, where: str) -> Schema:
    """A string's schema. Lengths become a pattern, which compiles to a tenth of the size."""
    lengths = [word for word in ("maxLength", "minLength") if word in words]
    chosen = [*(word for word in ("pattern", "format") if word in words), *lengths[:1]]
    if len(chosen) > 1:
        raise InvalidRequest(
            f"'{chosen[0]}' and '{chosen[1]}' of the JSON schema at {where} cannot both be enforced; keep one"
        )
    if "pattern" in words:
        pattern = check_pattern(words["pattern"], f"'pattern' of the JSON schema at {where}")
        return {"type": "string", "pattern": pattern}
    if "format" in words:
        if not isinstance(words["format"], str) or words["format"] not in FORMATS:
            raise InvalidRequest(
                f"'format' of the JSON schema at {where} is not supported; known are {', '.join(sorted(FORMATS))}"
            )
        return {"type": "string", "format": words["format"]}
    return {"type": "string", **_lengths(words, where)}


def _lengths(words: Schema, where: str) -> Schema:
    low, high = count(words, "minLength", where), count(words, "maxLength", where, MAX_COUNT)
    if low > high:
        raise InvalidRequest(f"'minLength' exceeds 'maxLength' in the JSON schema at {where}")
    longest = high if "maxLength" in words else low
    if longest > MAX_PATTERN_LENGTH:
        return {word: count(words, word, where) for word in words}
    if "maxLength" in words:
        return {"pattern": f"^{ANY_CHARACTER}{{{low},{high}}}$"}
    return {"pattern": f"^{ANY_CHARACTER}{{{low},}}$"} if low else {}


def lower_number(kind: str, words: Schema, where: str) -> Schema:
    """A number's or an integer's schema."""
    for word, value in words.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise InvalidRequest(f"'{word}' of the JSON schema at {where} must be a number")
        if abs(value) > MAX_EXACT_INTEGER:
            raise InvalidRequest(
                f"'{word}' of the JSON schema at {where} is beyond 2**53, where numbers are not exact"
            )
    bounds = (
        _integer_bounds(words) if kind == "integer" else {w: v for w, v in words.items() if w != "multipleOf"}
    )
    if "multipleOf" not in words:
        return {"type": kind, **bounds}
    step = words["multipleOf"]
    if kind != "integer" or bounds or step != int(step) or not 1 <= step <= MAX_MULTIPLE:
        raise InvalidRequest(
            f"'multipleOf' of the JSON schema at {where} is supported for integers without bounds, "
            f"and from 1 to {MAX_MULTIPLE}; remove it"
        )
    return {"type": kind, "multipleOf": int(step)}


def _integer_bounds(words: Schema) -> Schema:
    bounds: Schema = {}
    lows = [math.ceil(words["minimum"])] if "minimum" in words else []
    lows += [math.floor(words["exclusiveMinimum"]) + 1] if "exclusiveMinimum" in words else []
    highs = [math.floor(words["maximum"])] if "maximum" in words else []
    highs += [math.ceil(words["exclusiveMaximum"]) - 1] if "exclusiveMaximum" in words else []
    if lows:
        bounds["minimum"] = max(lows)
    if highs:
        bounds["maximum"] = min(highs)
    return bounds


def lower_array(words: Schema, where: str, lower: Lower) -> Schema:
    """An array's schema. After ``prefixItems``, only what ``items`` describes is written."""
    prefix = words.get("prefixItems", [])
    if not isinstance(prefix, list) or isinstance(words.get("items"), list):
        raise InvalidRequest(
            f"'prefixItems' of the JSON schema at {where} must be a list of schemas, and 'items' one schema"
        )
    low, high = count(words, "minItems", where), count(words, "maxItems", where, MAX_COUNT)
    rest = words.get("items", not prefix)
    prefix = prefix[:high] if "maxItems" in words else prefix
    if rest is False or ("maxItems" in words and high <= len(prefix)):
        rest, high = False, min(high, len(prefix))
    if low > high:
        raise InvalidRequest(f"'minItems' exceeds the items that the JSON schema at {where} allows")
    found: Schema = {"type": "array", "minItems": low}
    if prefix:
        found["prefixItems"] = [lower(item, f"{where}/prefixItems/{i}") for i, item in enumerate(prefix)]
    if rest is False and not prefix:
        return {"type": "array", "maxItems": 0}
    found["items"] = False if rest is False else lower(rest, f"{where}/items")
    if rest is not False and "maxItems" in words:
        found["maxItems"] = high
    return found


def select_enum_values(node: Schema, where: str) -> list[Any]:
    """The values of ``enum`` or ``const`` that the schema's ``type`` allows."""
    for word in node:
        if word not in ("enum", "const", "type"):
            raise InvalidRequest(
                f"'{word}' beside 'enum' or 'const' in the JSON schema at {where} is not supported; remove it"
            )
    values = node.get("enum", [node.get("const")])
    if not isinstance(values, list) or not values:
        raise InvalidRequest(f"'enum' of the JSON schema at {where} must be a list of values, not empty")
    if "enum" in node and "const" in node:
        values = [value for value in values if _same(value, node["const"])]
    kinds = node.get("type", list(TYPE_KEYWORDS))
    kinds = kinds if isinstance(kinds, list) else [kinds]
    fitting = [value for value in values if any(is_a(value, kind) for kind in kinds)]
    if not fitting:
        raise InvalidRequest(
            f"no value of 'enum' or 'const' in the JSON schema at {where} has the wanted type"
        )
    for value in fitting:
        _check_exact(value, where)
    return fitting


def count(words: Schema, word: str, where: str, otherwise: int = 0) -> int:
    """A word whose value is a whole number from 0 to ``MAX_COUNT``."""
    value = words.get(word, otherwise)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or value != int(value)
        or not 0 <= value <= MAX_COUNT
    ):
        raise InvalidRequest(
            f"'{word}' of the JSON schema at {where} must be a whole number from 0 to {MAX_COUNT}"
        )
    return int(value)


def is_a(value: Any, kind: Any) -> bool:
    """Whether a value is of a type of JSON's."""
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


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _check_exact(value: Any, where: str) -> None:
    """Refuse what would not be written as it stands."""
    if isinstance(value, int | float) and not (math.isfinite(value) and abs(value) <= MAX_EXACT_INTEGER):
        raise InvalidRequest(
            f"a number of 'enum' or 'const' in the JSON schema at {where} is beyond 2**53; use a smaller one"
        )
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_exact(part, where)
