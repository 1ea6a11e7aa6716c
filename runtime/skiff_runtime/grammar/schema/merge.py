"""Merges two JSON schemas that must both hold into one; refuses keywords that cannot be merged exactly."""

from typing import Any, Final

from skiff_runtime.errors import InvalidRequest

_ANNOTATIONS: Final = frozenset(
    {
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "contentEncoding",
        "contentMediaType",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
"""Keywords that constrain nothing. Definitions constrain only where a reference uses them."""
_NO_OPS: Final[dict[str, Any]] = {
    "uniqueItems": False,
    "minContains": 0,
    "unevaluatedProperties": True,
    "unevaluatedItems": True,
}
_CONTEXTUAL: Final = (
    frozenset({"properties", "patternProperties", "additionalProperties", "propertyNames"}),
    frozenset({"items", "prefixItems"}),
)
"""Groups of keywords whose meaning depends on the other keywords of their group in the same schema.

``additionalProperties`` of one schema, for example, excludes the ``properties`` of the other.
"""
_LOWER_BOUNDS: Final = frozenset({"minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"})
_UPPER_BOUNDS: Final = frozenset({"maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"})


def strip_annotations(node: dict[str, Any]) -> dict[str, Any]:
    """Return ``node`` without annotations, extensions (``x-...``) and keywords with a value that allows everything."""
    return {
        keyword: value
        for keyword, value in node.items()
        if keyword not in _ANNOTATIONS
        and not keyword.startswith("x-")
        and not (keyword in _NO_OPS and value is _NO_OPS[keyword])
    }


def merge(one: dict[str, Any], other: dict[str, Any], location: str) -> dict[str, Any]:
    """Return a schema of the values that meet both. ``location`` is that of ``other``, for errors."""
    for group in _CONTEXTUAL:
        mine, theirs = one.keys() & group, other.keys() & group
        if mine and theirs and mine | theirs != {"properties"}:
            raise _conflict(min(theirs - {"properties"} or mine - {"properties"}), location)
    whole = dict(one)
    for keyword, value in other.items():
        whole[keyword] = (
            _merge_keyword(keyword, whole[keyword], value, location) if keyword in whole else value
        )
    return whole


def _merge_keyword(keyword: str, one: Any, other: Any, location: str) -> Any:
    if one == other and type(one) is type(other):
        return one
    if keyword == "required" and isinstance(one, list) and isinstance(other, list):
        return one + [name for name in other if name not in one]
    if keyword == "properties" and isinstance(one, dict) and isinstance(other, dict):
        return _merge_properties(one, other, location)
    if keyword == "type":
        return _merge_types(one, other, location)
    if keyword in _LOWER_BOUNDS and _are_numbers(one, other):
        return max(one, other)
    if keyword in _UPPER_BOUNDS and _are_numbers(one, other):
        return min(one, other)
    raise _conflict(keyword, location)


def _merge_properties(one: dict[str, Any], other: dict[str, Any], location: str) -> dict[str, Any]:
    whole = dict(one)
    for name, schema in other.items():
        if name in whole and whole[name] != schema:
            raise InvalidRequest(
                f"the JSON schema describes the property {name[:60]!r} twice, the second time at {location}; describe it once"
            )
        whole[name] = schema
    return whole


def _merge_types(one: Any, other: Any, location: str) -> list[str]:
    mine, theirs = ([kinds] if isinstance(kinds, str) else kinds for kinds in (one, other))
    if not isinstance(mine, list) or not isinstance(theirs, list):
        raise _conflict("type", location)
    common = [kind for kind in mine if kind in theirs or (kind == "integer" and "number" in theirs)]
    common += [kind for kind in theirs if kind == "integer" and "number" in mine and kind not in common]
    if not common:
        raise InvalidRequest(f"no value has both types of the JSON schema at {location}")
    return common


def _are_numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _conflict(keyword: str, location: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{keyword}' of the JSON schema at {location} cannot be combined with the other constraints there; write one schema"
    )
