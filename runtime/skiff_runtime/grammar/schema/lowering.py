"""JSON schemas rewritten so that the grammar made of them enforces every word of them.

xgrammar passes over what it does not know, and over some words that it knows in company of others. So a schema
is rewritten before xgrammar sees it: each word becomes something that is enforced, or the schema is refused
with the word's name. What comes out accepts the same values or fewer: properties and items that a schema does
not mention are not written, members come in the schema's order, and a string has one spelling.
"""

from typing import Any, Final
from urllib.parse import unquote

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.schema.disjoint import disjoint
from skiff_runtime.grammar.schema.merge import constraints, merge
from skiff_runtime.grammar.schema.objects import lower_object
from skiff_runtime.grammar.schema.types import (
    TYPE_KEYWORDS,
    lower_array,
    lower_number,
    lower_string,
    select_enum_values,
)

MAX_NODES: Final = 20_000
"""Subschemas, counted as often as they are rewritten."""
MAX_DEPTH: Final = 64
_COMBINATORS: Final = ("anyOf", "oneOf")
_KNOWN: Final = frozenset(
    {
        "$ref",
        "allOf",
        "const",
        "enum",
        "type",
        *_COMBINATORS,
        *(word for words in TYPE_KEYWORDS.values() for word in words),
    }
)

Schema = dict[str, Any]


class UnsatisfiableSchema(InvalidRequest):
    """No value meets this part of the schema."""


def lower(schema: object) -> Schema:
    """``schema`` rewritten. Raises ``InvalidRequest`` that names what cannot be enforced, and where."""
    lowering = SchemaLowering(schema)
    found = lowering.schema(schema, "#")
    defs = lowering.definitions
    endless = set(defs) - _finite(defs)
    if endless:
        raise UnsatisfiableSchema("the JSON schema refers to itself in a way that no finite value meets")
    return {**found, "$defs": defs} if defs else found


class SchemaLowering:
    """Rewrites the subschemas of one root; targets of references become ``definitions``."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._nodes = 0
        self._depth = 0
        self.definitions: dict[str, Schema] = {}

    def schema(self, node: object, where: str) -> Schema:
        """One subschema rewritten; ``where`` is its JSON pointer, for errors."""
        if node is False:
            raise UnsatisfiableSchema(f"nothing meets the JSON schema at {where}, which is false")
        if node is True:
            return {}
        if not isinstance(node, dict):
            raise InvalidRequest(f"the JSON schema at {where} must be an object or a boolean")
        self._nodes += 1
        self._depth += 1
        if self._nodes > MAX_NODES or self._depth > MAX_DEPTH:
            raise InvalidRequest(
                f"the JSON schema is larger than {MAX_NODES} parts or deeper than {MAX_DEPTH} levels; use a smaller one"
            )
        try:
            return self._lower(constraints(node), where)
        finally:
            self._depth -= 1

    def _lower(self, node: Schema, where: str) -> Schema:
        for word in node:
            if word not in _KNOWN:
                raise unsupported(word, where)
        if "$ref" in node and len(node) == 1:
            return self._reference(node["$ref"], where)
        if "$ref" in node:
            rest = {word: value for word, value in node.items() if word != "$ref"}
            return self.schema(merge(rest, self._inlined({"$ref": node["$ref"]}, where), where), where)
        if "allOf" in node:
            return self._all_of(node, where)
        for word in _COMBINATORS:
            if word in node:
                return self._any_of(node, word, where)
        if "enum" in node or "const" in node:
            return {"enum": select_enum_values(node, where)}
        return self._typed(node, where)

    def _typed(self, node: Schema, where: str) -> Schema:
        """A schema of types and their words; each type takes its own words, which mean nothing to the others."""
        kinds = node.get("type")
        if kinds is None:
            kinds = [
                kind for kind, words in TYPE_KEYWORDS.items() if kind != "integer" and words & node.keys()
            ]
        elif isinstance(kinds, str):
            kinds = [kinds]
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise InvalidRequest(f"'type' of the JSON schema at {where} must be a name or a list of names")
        if "number" in kinds:
            kinds = [kind for kind in kinds if kind != "integer"]
        if not kinds:
            return {}
        return _alternatives([self._of_type(kind, node, where) for kind in dict.fromkeys(kinds)])

    def _of_type(self, kind: str, node: Schema, where: str) -> Schema:
        if kind not in TYPE_KEYWORDS:
            known = ", ".join(TYPE_KEYWORDS)
            raise InvalidRequest(
                f"the JSON schema at {where} names the type {kind[:40]!r}; types are {known}"
            )
        own = {word: node[word] for word in node if word in TYPE_KEYWORDS[kind]}
        match kind:
            case "string":
                return lower_string(own, where)
            case "number" | "integer":
                return lower_number(kind, own, where)
            case "array":
                return lower_array(own, where, self.schema)
            case "object":
                return lower_object(own, where, self.schema)
        return {"type": kind}

    def _any_of(self, node: Schema, word: str, where: str) -> Schema:
        branches = _list_of_schemas(node[word], word, where)
        if word == "oneOf":
            self._check_apart(branches, where)
        rest = {other: value for other, value in node.items() if other != word}
        found = []
        for index, branch in enumerate(branches):
            place = f"{where}/{word}/{index}"
            try:
                whole = merge(rest, self._inlined(branch, place), place) if rest else branch
                found.append(self.schema(whole, place))
            except UnsatisfiableSchema:
                continue
        if not found:
            raise UnsatisfiableSchema(f"nothing meets any of '{word}' of the JSON schema at {where}")
        return _alternatives(found)

    def _check_apart(self, branches: list[Any], where: str) -> None:
        self._nodes += len(branches) ** 2
        if self._nodes > MAX_NODES:
            raise InvalidRequest(f"'oneOf' of the JSON schema at {where} has too many branches; use fewer")
        for index, branch in enumerate(branches):
            for earlier in range(index):
                if not disjoint(branch, branches[earlier], lambda node: self._resolved(node, where)):
                    raise InvalidRequest(
                        f"'oneOf' of the JSON schema at {where}: one value may meet both branch {earlier} and branch "
                        f"{index}; tell them apart by type, const, enum, bounds or a property that both require, "
                        "or use 'anyOf'"
                    )

    def _resolved(self, node: Any, where: str) -> Any:
        """What a reference refers to, where it stands alone."""
        for _ in range(MAX_DEPTH):
            if not (isinstance(node, dict) and constraints(node).keys() == {"$ref"}):
                return node
            node = self._target(node["$ref"], where)
        return True

    def _all_of(self, node: Schema, where: str) -> Schema:
        whole = {word: value for word, value in node.items() if word != "allOf"}
        members = _list_of_schemas(node["allOf"], "allOf", where)
        if not whole and len(members) == 1:
            return self.schema(members[0], f"{where}/allOf/0")
        for index, member in enumerate(members):
            place = f"{where}/allOf/{index}"
            whole = merge(whole, self._inlined(member, place), place)
        return self.schema(whole, where)

    def _inlined(self, node: object, where: str) -> Schema:
        """A member that is to be merged: what it refers to, and no reference itself."""
        for _ in range(MAX_DEPTH):
            self._nodes += 1
            if node is False:
                raise UnsatisfiableSchema(f"nothing meets the JSON schema at {where}, which is false")
            if node is True:
                return {}
            if not isinstance(node, dict):
                raise InvalidRequest(f"the JSON schema at {where} must be an object or a boolean")
            node = constraints(node)
            if "$ref" not in node:
                return node
            if len(node) > 1:
                raise unsupported("$ref", where, "beside other words, within another combination")
            node = self._target(node["$ref"], where)
        raise UnsatisfiableSchema(f"'$ref' of the JSON schema at {where} refers to itself")

    def _reference(self, pointer: object, where: str) -> Schema:
        target = self._target(pointer, where)
        assert isinstance(pointer, str)
        if pointer not in self._names:
            name = self._names[pointer] = f"r{len(self._names)}"
            self.definitions[name] = {}
            self.definitions[name] = self.schema(target, pointer)
        return {"$ref": f"#/$defs/{self._names[pointer]}"}

    def _target(self, pointer: object, where: str) -> object:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise InvalidRequest(
                f"'$ref' of the JSON schema at {where} must point into the schema itself, as in '#/$defs/name'"
            )
        node = self._root
        for part in pointer.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                raise InvalidRequest(
                    f"'$ref' of the JSON schema at {where} points to {pointer[:80]!r}, which is not there"
                )
        return node


def unsupported(word: str, where: str, when: str = "") -> InvalidRequest:
    """The refusal of a keyword."""
    reason = f"is not supported {when}" if when else "is not supported"
    return InvalidRequest(f"'{word[:60]}' of the JSON schema at {where} {reason}; remove it")


def _alternatives(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _list_of_schemas(value: object, word: str, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"'{word}' of the JSON schema at {where} must be a list of schemas, not empty")
    return value


def _finite(definitions: dict[str, Schema]) -> set[str]:
    """Names of the definitions that some finite value meets: the least fixed point."""
    finite: set[str] = set()
    while True:
        more = {
            name for name, schema in definitions.items() if name not in finite and _is_finite(schema, finite)
        }
        if not more:
            return finite
        finite |= more


def _is_finite(schema: Schema, finite: set[str]) -> bool:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2] in finite
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches:
        return any(_is_finite(branch, finite) for branch in branches)
    if schema.get("type") == "object":
        properties = schema.get("properties", {})
        return all(_is_finite(properties[name], finite) for name in schema.get("required", ()))
    if schema.get("type") == "array":
        needed = schema.get("minItems", 0)
        prefix = schema.get("prefixItems", [])
        items = [*prefix[:needed], *([schema.get("items", {})] if needed > len(prefix) else [])]
        return all(isinstance(item, dict) and _is_finite(item, finite) for item in items)
    return True
