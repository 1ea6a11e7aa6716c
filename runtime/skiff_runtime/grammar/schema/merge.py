"""Two JSON schemas that must both hold, as one; words that cannot be put together exactly are refused."""

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
"""Words that constrain nothing. Definitions do so only where they are referred to."""
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
"""Words whose meaning depends on their neighbours in the same schema."""


def constraints(node: dict[str, Any]) -> dict[str, Any]:
    """``node`` without annotations, extensions (``x-...``) and words at a value that allows everything."""
    return {
        word: value
        for word, value in node.items()
        if word not in _ANNOTATIONS
        and not word.startswith("x-")
        and not (word in _NO_OPS and value is _NO_OPS[word])
    }


def merge(one: dict[str, Any], other: dict[str, Any], where: str) -> dict[str, Any]:
    """What meets both. ``where`` is the place of ``other``, for errors."""
    for group in _CONTEXTUAL:
        both = (one.keys() & group, other.keys() & group)
        if all(both) and both[0] | both[1] != {"properties"}:
            raise _clash(min(both[1] - {"properties"} or both[0] - {"properties"}), where)
    whole = dict(one)
    for word, value in other.items():
        whole[word] = _both(word, whole[word], value, where) if word in whole else value
    return whole


def _both(word: str, one: Any, other: Any, where: str) -> Any:
    if one == other and type(one) is type(other):
        return one
    if word == "required" and isinstance(one, list) and isinstance(other, list):
        return one + [name for name in other if name not in one]
    if word == "properties" and isinstance(one, dict) and isinstance(other, dict):
        return _both_properties(one, other, where)
    if word == "type":
        return _both_types(one, other, where)
    if word in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties") and _numbers(
        one, other
    ):
        return max(one, other)
    if word in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties") and _numbers(
        one, other
    ):
        return min(one, other)
    raise _clash(word, where)


def _both_properties(one: dict[str, Any], other: dict[str, Any], where: str) -> dict[str, Any]:
    whole = dict(one)
    for name, schema in other.items():
        if name in whole and whole[name] != schema:
            raise InvalidRequest(
                f"the property {name[:60]!r} is described twice in the JSON schema, once more at {where}; describe it once"
            )
        whole[name] = schema
    return whole


def _both_types(one: Any, other: Any, where: str) -> list[str]:
    mine, theirs = ([kinds] if isinstance(kinds, str) else kinds for kinds in (one, other))
    if not isinstance(mine, list) or not isinstance(theirs, list):
        raise _clash("type", where)
    common = [kind for kind in mine if kind in theirs or (kind == "integer" and "number" in theirs)]
    common += [kind for kind in theirs if kind == "integer" and "number" in mine and kind not in common]
    if not common:
        raise InvalidRequest(f"nothing has both types of the JSON schema at {where}")
    return common


def _numbers(*values: Any) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _clash(word: str, where: str) -> InvalidRequest:
    return InvalidRequest(
        f"'{word}' of the JSON schema at {where} cannot be combined with what else must hold there; write one schema"
    )
