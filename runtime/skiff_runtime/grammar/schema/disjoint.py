"""Disjointness of JSON schemas: if no value meets two branches, ``oneOf`` means the same as ``anyOf``.

A grammar can enforce ``anyOf`` only. Whatever cannot be proved to be disjoint counts as overlapping.
"""

import math
from collections.abc import Callable
from typing import Any, Final

from skiff_runtime.grammar.schema.merge import strip_annotations
from skiff_runtime.grammar.schema.types import TYPE_KEYWORDS, has_type, is_same_value

MAX_DEPTH: Final = 16

Resolve = Callable[[Any], Any]
"""Follows the reference if the schema is one."""


def are_disjoint(one: Any, other: Any, resolve: Resolve, depth: int = 0) -> bool:
    """Return True if it is proved that no value meets both schemas, which have not been lowered."""
    one, other = resolve(one), resolve(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > MAX_DEPTH:
        return False
    one, other = strip_annotations(one), strip_annotations(other)
    for left, right in ((one, other), (other, one)):
        for keyword in ("anyOf", "oneOf"):
            branches = left.get(keyword)
            if isinstance(branches, list) and all(
                are_disjoint(b, right, resolve, depth + 1) for b in branches
            ):
                return True
        members = left.get("allOf")
        if isinstance(members, list) and any(are_disjoint(m, right, resolve, depth + 1) for m in members):
            return True
    # Two lists of values are compared exactly; otherwise each type that both allow must be excluded by itself.
    mine, theirs = _enumerate(one), _enumerate(other)
    if mine is not None and theirs is not None:
        return not any(is_same_value(a, b) for a in mine for b in theirs)
    common = _kinds(one) & _kinds(other)
    return all(_are_disjoint_as(kind, one, other, resolve, depth) for kind in common)


def _are_disjoint_as(
    kind: str, one: dict[str, Any], other: dict[str, Any], resolve: Resolve, depth: int
) -> bool:
    """Return True if it is proved that no value of this type meets both schemas.

    For objects, a property that both require, with disjoint schemas, is such a proof (the tag of a tagged union).
    """
    if kind == "number":
        # Exclusive bounds are not considered: then more counts as overlapping than does overlap.
        return _highest(one) < _lowest(other) or _highest(other) < _lowest(one)
    if kind != "object":
        return False
    required = [name for name in one.get("required", ()) if name in other.get("required", ())]
    mine, theirs = one.get("properties", {}), other.get("properties", {})
    return any(
        are_disjoint(mine[name], theirs[name], resolve, depth + 1)
        for name in required
        if name in mine and name in theirs
    )


def _kinds(schema: dict[str, Any]) -> set[str]:
    """Return the types that the values of a schema can have; integers are numbers."""
    values = _enumerate(schema)
    if values is not None:
        return {
            kind
            for kind in TYPE_KEYWORDS
            if kind != "integer" and any(has_type(value, kind) for value in values)
        }
    kinds = schema.get("type", list(TYPE_KEYWORDS))
    return {
        "number" if kind == "integer" else kind for kind in (kinds if isinstance(kinds, list) else [kinds])
    }


def _enumerate(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _lowest(schema: dict[str, Any]) -> float:
    return _bound(schema, "minimum", -math.inf)


def _highest(schema: dict[str, Any]) -> float:
    return _bound(schema, "maximum", math.inf)


def _bound(schema: dict[str, Any], keyword: str, default: float) -> float:
    value = schema.get(keyword, default)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default
