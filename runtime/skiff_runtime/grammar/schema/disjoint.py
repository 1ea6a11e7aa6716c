"""Whether two JSON schemas exclude each other, so that ``oneOf`` means ``anyOf``; what cannot be proved is not so."""

import math
from collections.abc import Callable
from typing import Any, Final

from skiff_runtime.grammar.schema.merge import constraints
from skiff_runtime.grammar.schema.types import TYPE_KEYWORDS, is_a

MAX_DEPTH: Final = 16

Resolve = Callable[[Any], Any]
"""What a schema says when its reference, if it is one, is followed."""


def disjoint(one: Any, other: Any, resolve: Resolve, depth: int = 0) -> bool:
    """No value meets both. Schemas are taken as they are written, before anything is narrowed."""
    one, other = resolve(one), resolve(other)
    if one is False or other is False:
        return True
    if not isinstance(one, dict) or not isinstance(other, dict) or depth > MAX_DEPTH:
        return False
    one, other = constraints(one), constraints(other)
    for left, right in ((one, other), (other, one)):
        for word in ("anyOf", "oneOf"):
            branches = left.get(word)
            if isinstance(branches, list) and all(disjoint(b, right, resolve, depth + 1) for b in branches):
                return True
        members = left.get("allOf")
        if isinstance(members, list) and any(disjoint(m, right, resolve, depth + 1) for m in members):
            return True
    mine, theirs = _values(one), _values(other)
    if mine is not None and theirs is not None:
        return not any(_same(a, b) for a in mine for b in theirs)
    common = _kinds(one) & _kinds(other)
    return all(_apart(kind, one, other, resolve, depth) for kind in common)


def _apart(kind: str, one: dict[str, Any], other: dict[str, Any], resolve: Resolve, depth: int) -> bool:
    """No value of this type meets both."""
    if kind == "number":
        return _highest(one) < _lowest(other) or _highest(other) < _lowest(one)
    if kind != "object":
        return False
    required = [name for name in one.get("required", ()) if name in other.get("required", ())]
    mine, theirs = one.get("properties", {}), other.get("properties", {})
    return any(
        disjoint(mine[name], theirs[name], resolve, depth + 1)
        for name in required
        if name in mine and name in theirs
    )


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The types of the values that meet a schema; integers are numbers."""
    values = _values(schema)
    if values is not None:
        return {
            kind for kind in TYPE_KEYWORDS if kind != "integer" and any(is_a(value, kind) for value in values)
        }
    kinds = schema.get("type", list(TYPE_KEYWORDS))
    return {
        "number" if kind == "integer" else kind for kind in (kinds if isinstance(kinds, list) else [kinds])
    }


def _values(schema: dict[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _lowest(schema: dict[str, Any]) -> float:
    return _bound(schema, "minimum", -math.inf)


def _highest(schema: dict[str, Any]) -> float:
    return _bound(schema, "maximum", math.inf)


def _bound(schema: dict[str, Any], word: str, otherwise: float) -> float:
    value = schema.get(word, otherwise)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise
