"""Objects of a JSON schema: checks which of their keywords can be enforced together, and lowers them."""

from typing import Any

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.schema.pattern import check_pattern, literal_prefix
from skiff_runtime.grammar.schema.types import MAX_COUNT, LowerSchema, Schema, read_count


def lower_object(keywords: Schema, location: str, lower: LowerSchema) -> Schema:
    """Lower the schema of an object.

    An object with named properties has others only if ``additionalProperties`` allows them explicitly.
    """
    properties = _read_mapping(keywords, "properties", location)
    patterns = _read_mapping(keywords, "patternProperties", location)
    required = keywords.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise InvalidRequest(f"'required' of the JSON schema at {location} must be a list of names")
    named = bool(properties or required)
    # xgrammar enforces only one way to constrain names: a list, patterns, or a schema of all names.
    ways = [keyword for keyword, used in (("properties", named), ("patternProperties", patterns)) if used]
    ways += ["propertyNames"] if keywords.get("propertyNames", True) is not True else []
    if len(ways) > 1:
        raise InvalidRequest(
            f"'{ways[0]}' and '{ways[1]}' of the JSON schema at {location} cannot both be enforced; keep one"
        )
    found: Schema = {"type": "object"}
    if named:
        found |= _lower_named(properties, list(dict.fromkeys(required)), keywords, location, lower)
    elif patterns:
        found |= {
            "patternProperties": _lower_patterns(patterns, location, lower),
            "additionalProperties": False,
        }
    else:
        found |= _lower_free(keywords, location, lower)
    return found | _lower_counts(keywords, found, location)


def _lower_named(
    properties: Schema, required: list[str], keywords: Schema, location: str, lower: LowerSchema
) -> Schema:
    others = keywords.get("additionalProperties", False)
    lowered: Schema = {}
    for name, schema in properties.items():
        if schema is False and name not in required and others is False:
            continue  # forbidden by name, and as an additional property as well
        lowered[name] = lower(schema, f"{location}/properties/{name[:60]}")
    for name in required:
        if name not in lowered:
            default = (
                True if "additionalProperties" not in keywords else others
            )  # required, but not described
            lowered[name] = lower(default, f"{location}/required/{name[:60]}")
    rest = False if others is False else lower(others, f"{location}/additionalProperties")
    return {"properties": lowered, "required": required, "additionalProperties": rest}


def _lower_patterns(patterns: Schema, location: str, lower: LowerSchema) -> Schema:
    """Lower the schemas of property names that match a pattern.

    A name is generated from one pattern only, so it must not match a second one, whose schema would be ignored.
    Distinct literal prefixes ensure that.
    """
    what = f"'patternProperties' of the JSON schema at {location}"
    checked = {pattern: check_pattern(pattern, what) for pattern in patterns}
    prefixes = [literal_prefix(pattern) for pattern in patterns]
    for index, prefix in enumerate(prefixes):
        for other in prefixes[:index]:
            shared = min(len(prefix), len(other))
            if prefix[:shared] == other[:shared]:
                raise InvalidRequest(
                    f"'patternProperties' of the JSON schema at {location} has patterns that may match the same name; "
                    "begin each with ^ and distinct letters"
                )
    return {
        checked[pattern]: lower(schema, f"{location}/patternProperties")
        for pattern, schema in patterns.items()
    }


def _lower_free(keywords: Schema, location: str, lower: LowerSchema) -> Schema:
    others = keywords.get("additionalProperties", True)
    rest = False if others is False else lower(others, f"{location}/additionalProperties")
    names = keywords.get("propertyNames", True)
    if names is True:
        return {"additionalProperties": rest}
    if not isinstance(names, dict):
        raise InvalidRequest(f"'propertyNames' of the JSON schema at {location} must be a schema of strings")
    lowered = lower({"type": "string", **names}, f"{location}/propertyNames")
    if "anyOf" in lowered or "oneOf" in lowered or "$ref" in lowered:
        raise InvalidRequest(
            f"'propertyNames' of the JSON schema at {location} may use pattern, format, lengths or enum only"
        )
    return {"propertyNames": lowered, "additionalProperties": rest}


def _lower_counts(keywords: Schema, found: Schema, location: str) -> Schema:
    low = read_count(keywords, "minProperties", location)
    high = read_count(keywords, "maxProperties", location, MAX_COUNT)
    needed = len(found.get("required", ()))
    closed = found["additionalProperties"] is False and "patternProperties" not in found
    most = len(found.get("properties", ())) if closed else MAX_COUNT
    if max(low, needed) > min(high, most):
        raise InvalidRequest(f"the JSON schema at {location} needs more properties than it allows")
    if low > max(1, needed) and not closed:
        raise InvalidRequest(
            f"'minProperties' of the JSON schema at {location} is supported up to 1 or the number of required properties, "
            "unless all properties are named and 'additionalProperties' is false"
        )
    counts = {"minProperties": low} if low > needed else {}
    return counts | ({"maxProperties": high} if high < most else {})


def _read_mapping(keywords: Schema, keyword: str, location: str) -> dict[str, Any]:
    value = keywords.get(keyword, {})
    if not isinstance(value, dict):
        raise InvalidRequest(f"'{keyword}' of the JSON schema at {location} must be an object of schemas")
    return value
