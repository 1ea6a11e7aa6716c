"""Objects of a JSON schema: which members they have, in which company each word is enforced."""

from typing import Any

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.schema.pattern import check_pattern, literal_prefix
from skiff_runtime.grammar.schema.types import MAX_COUNT, Lower, Schema, count


def lower_object(words: Schema, where: str, lower: Lower) -> Schema:
    """An object's schema. Beside named properties, others are written only where ``additionalProperties`` says so."""
    properties = _mapping(words, "properties", where)
    patterns = _mapping(words, "patternProperties", where)
    required = words.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequest(f"'required' of the JSON schema at {where} must be a list of names")
    named = bool(properties or required)
    kinds = [word for word, there in (("properties", named), ("patternProperties", patterns)) if there]
    kinds += ["propertyNames"] if words.get("propertyNames", True) is not True else []
    if len(kinds) > 1:
        raise InvalidRequest(
            f"'{kinds[0]}' and '{kinds[1]}' of the JSON schema at {where} cannot both be enforced; keep one"
        )
    found: Schema = {"type": "object"}
    if named:
        found |= _named(properties, list(dict.fromkeys(required)), words, where, lower)
    elif patterns:
        found |= {"patternProperties": _patterns(patterns, where, lower), "additionalProperties": False}
    else:
        found |= _free(words, where, lower)
    return found | _counts(words, found, where)


def _named(properties: Schema, required: list[str], words: Schema, where: str, lower: Lower) -> Schema:
    others = words.get("additionalProperties", False)
    lowered: Schema = {}
    for name, schema in properties.items():
        if schema is False and name not in required and others is False:
            continue
        lowered[name] = lower(schema, f"{where}/properties/{name[:60]}")
    for name in required:
        if name not in lowered:
            default = True if "additionalProperties" not in words else others
            lowered[name] = lower(default, f"{where}/required/{name[:60]}")
    rest = False if others is False else lower(others, f"{where}/additionalProperties")
    return {"properties": lowered, "required": required, "additionalProperties": rest}


def _patterns(patterns: Schema, where: str, lower: Lower) -> Schema:
    """Each name is written by one pattern, so no other pattern may speak of it, too."""
    what = f"'patternProperties' of the JSON schema at {where}"
    written = {pattern: check_pattern(pattern, what) for pattern in patterns}
    starts = [literal_prefix(pattern) for pattern in patterns]
    for index, start in enumerate(starts):
        for other in starts[:index]:
            shared = min(len(start), len(other))
            if start[:shared] == other[:shared]:
                raise InvalidRequest(
                    f"'patternProperties' of the JSON schema at {where} has patterns that may match the same name; "
                    "begin each with ^ and letters of its own"
                )
    return {
        written[pattern]: lower(schema, f"{where}/patternProperties") for pattern, schema in patterns.items()
    }


def _free(words: Schema, where: str, lower: Lower) -> Schema:
    others = words.get("additionalProperties", True)
    rest = False if others is False else lower(others, f"{where}/additionalProperties")
    names = words.get("propertyNames", True)
    if names is True:
        return {"additionalProperties": rest}
    if not isinstance(names, dict):
        raise InvalidRequest(f"'propertyNames' of the JSON schema at {where} must be a schema of strings")
    lowered = lower({"type": "string", **names}, f"{where}/propertyNames")
    if "anyOf" in lowered or "oneOf" in lowered or "$ref" in lowered:
        raise InvalidRequest(
            f"'propertyNames' of the JSON schema at {where} may use pattern, format, lengths or enum; nothing else"
        )
    return {"propertyNames": lowered, "additionalProperties": rest}


def _counts(words: Schema, found: Schema, where: str) -> Schema:
    low, high = count(words, "minProperties", where), count(words, "maxProperties", where, MAX_COUNT)
    needed = len(found.get("required", ()))
    closed = found["additionalProperties"] is False and "patternProperties" not in found
    most = len(found.get("properties", ())) if closed else MAX_COUNT
    if max(low, needed) > min(high, most):
        raise InvalidRequest(f"the JSON schema at {where} needs more properties than it allows")
    if low > max(1, needed) and not closed:
        raise InvalidRequest(
            f"'minProperties' of the JSON schema at {where} is supported up to 1 or the number of required properties, "
            "unless all properties are named and 'additionalProperties' is false"
        )
    counts = {"minProperties": low} if low > needed else {}
    return counts | ({"maxProperties": high} if high < most else {})


def _mapping(words: Schema, word: str, where: str) -> dict[str, Any]:
    value = words.get(word, {})
    if not isinstance(value, dict):
        raise InvalidRequest(f"'{word}' of the JSON schema at {where} must be an object of schemas")
    return value
