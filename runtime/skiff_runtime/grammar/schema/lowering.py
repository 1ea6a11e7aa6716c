"""Lowering of JSON schemas: rewrites a schema so that xgrammar enforces every keyword of it.

xgrammar ignores the keywords that it does not know, and some that it knows in combination with others. So each keyword
is rewritten to something that xgrammar enforces, or the schema is refused with the keyword's name. The lowered schema
accepts the same values or fewer: an answer has no properties and items that the schema does not mention, its properties
are in the schema's order, and each string has one spelling.
"""

from typing import Any, Final
from urllib.parse import unquote

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.schema.disjoint import are_disjoint
from skiff_runtime.grammar.schema.merge import merge, strip_annotations
from skiff_runtime.grammar.schema.objects import lower_object
from skiff_runtime.grammar.schema.types import (
    TYPE_KEYWORDS,
    Schema,
    lower_array,
    lower_number,
    lower_string,
    select_enum_values,
)

MAX_NODES: Final = 20_000
"""Subschemas, counted each time they are rewritten."""
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
        *(keyword for keywords in TYPE_KEYWORDS.values() for keyword in keywords),
    }
)


class UnsatisfiableSchema(InvalidRequest):
    """No value meets this part of the schema. A branch of ``anyOf`` or ``oneOf`` may be so; then it is dropped."""


def lower_schema(schema: object) -> Schema:
    """Lower a JSON schema. Raises ``InvalidRequest`` that names the unenforceable keyword and its location."""
    lowering = SchemaLowering(schema)
    lowered = lowering.lower(schema, "#")
    defs = lowering.definitions
    if defs.keys() - _find_finite(defs):
        raise UnsatisfiableSchema("the JSON schema refers to itself in a way that no finite value can meet")
    return {**lowered, "$defs": defs} if defs else lowered


class SchemaLowering:
    """Lowers the subschemas of one root. The targets of references become ``definitions``."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._names: dict[str, str] = {}
        self._nodes = 0
        self._depth = 0
        self.definitions: dict[str, Schema] = {}

    def lower(self, node: object, location: str) -> Schema:
        """Lower one subschema; ``location`` is its JSON pointer, for errors."""
        if node is False:
            raise UnsatisfiableSchema(f"no value meets the JSON schema at {location}, which is false")
        if node is True:
            return {}
        if not isinstance(node, dict):
            raise InvalidRequest(f"the JSON schema at {location} must be an object or a boolean")
        self._nodes += 1
        self._depth += 1
        if self._nodes > MAX_NODES or self._depth > MAX_DEPTH:
            raise InvalidRequest(
                f"the JSON schema is larger than {MAX_NODES} parts or deeper than {MAX_DEPTH} levels; use a smaller one"
            )
        try:
            return self._lower_node(strip_annotations(node), location)
        finally:
            self._depth -= 1

    def _lower_node(self, node: Schema, location: str) -> Schema:
        for keyword in node:
            if keyword not in _KNOWN:
                raise _unsupported(keyword, location)
        if "$ref" in node and len(node) == 1:
            return self._lower_reference(node["$ref"], location)
        if "$ref" in node:
            rest = {keyword: value for keyword, value in node.items() if keyword != "$ref"}
            return self.lower(merge(rest, self._inline({"$ref": node["$ref"]}, location), location), location)
        if "allOf" in node:
            return self._lower_all_of(node, location)
        for keyword in _COMBINATORS:
            if keyword in node:
                return self._lower_any_of(node, keyword, location)
        if "enum" in node or "const" in node:
            return {"enum": select_enum_values(node, location)}
        return self._lower_types(node, location)

    def _lower_types(self, node: Schema, location: str) -> Schema:
        """Lower a schema of types. Each type gets its own keywords; they do not constrain values of other types."""
        kinds = node.get("type")
        if kinds is None:
            kinds = [
                kind
                for kind, keywords in TYPE_KEYWORDS.items()
                if kind != "integer" and keywords & node.keys()
            ]
        elif isinstance(kinds, str):
            kinds = [kinds]
        if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
            raise InvalidRequest(f"'type' of the JSON schema at {location} must be a name or a list of names")
        if "number" in kinds:
            kinds = [kind for kind in kinds if kind != "integer"]
        if not kinds:
            return {}
        return _alternatives([self._lower_type(kind, node, location) for kind in dict.fromkeys(kinds)])

    def _lower_type(self, kind: str, node: Schema, location: str) -> Schema:
        if kind not in TYPE_KEYWORDS:
            known = ", ".join(TYPE_KEYWORDS)
            raise InvalidRequest(
                f"the JSON schema at {location} names the unknown type {kind[:40]!r}; types are {known}"
            )
        own = {keyword: node[keyword] for keyword in node if keyword in TYPE_KEYWORDS[kind]}
        match kind:
            case "string":
                return lower_string(own, location)
            case "number" | "integer":
                return lower_number(kind, own, location)
            case "array":
                return lower_array(own, location, self.lower)
            case "object":
                return lower_object(own, location, self.lower)
        return {"type": kind}

    def _lower_any_of(self, node: Schema, keyword: str, location: str) -> Schema:
        branches = _read_schemas(node[keyword], keyword, location)
        if keyword == "oneOf":
            self._check_disjoint(branches, location)
        rest = {other: value for other, value in node.items() if other != keyword}
        lowered = []
        for index, branch in enumerate(branches):
            at = f"{location}/{keyword}/{index}"
            try:
                whole = merge(rest, self._inline(branch, at), at) if rest else branch
                lowered.append(self.lower(whole, at))
            except UnsatisfiableSchema:
                continue
        if not lowered:
            raise UnsatisfiableSchema(
                f"no value meets any branch of '{keyword}' of the JSON schema at {location}"
            )
        return _alternatives(lowered)

    def _check_disjoint(self, branches: list[Any], location: str) -> None:
        self._nodes += len(branches) ** 2
        if self._nodes > MAX_NODES:
            raise InvalidRequest(f"'oneOf' of the JSON schema at {location} has too many branches; use fewer")
        for index, branch in enumerate(branches):
            for earlier in range(index):
                if not are_disjoint(
                    branch, branches[earlier], lambda node: self._follow_reference(node, location)
                ):
                    raise InvalidRequest(
                        f"'oneOf' of the JSON schema at {location}: one value may meet both branch {earlier} and "
                        f"branch {index}; distinguish them by type, const, enum, bounds or a property that both require, "
                        "or use 'anyOf'"
                    )

    def _follow_reference(self, node: Any, location: str) -> Any:
        """Return the target of ``node`` if it is a reference and nothing else, otherwise ``node``."""
        for _ in range(MAX_DEPTH):
            if not (isinstance(node, dict) and strip_annotations(node).keys() == {"$ref"}):
                return node
            node = self._find_target(node["$ref"], location)
        return True  # a cycle: it may accept anything

    def _lower_all_of(self, node: Schema, location: str) -> Schema:
        whole = {keyword: value for keyword, value in node.items() if keyword != "allOf"}
        members = _read_schemas(node["allOf"], "allOf", location)
        if not whole and len(members) == 1:
            return self.lower(members[0], f"{location}/allOf/0")
        for index, member in enumerate(members):
            at = f"{location}/allOf/{index}"
            whole = merge(whole, self._inline(member, at), at)
        return self.lower(whole, location)

    def _inline(self, node: object, location: str) -> Schema:
        """Return a member to be merged, with its reference replaced by the target."""
        for _ in range(MAX_DEPTH):
            self._nodes += 1
            if node is False:
                raise UnsatisfiableSchema(f"no value meets the JSON schema at {location}, which is false")
            if node is True:
                return {}
            if not isinstance(node, dict):
                raise InvalidRequest(f"the JSON schema at {location} must be an object or a boolean")
            node = strip_annotations(node)
            if "$ref" not in node:
                return node
            if len(node) > 1:
                raise _unsupported("$ref", location, "beside other keywords within another combination")
            node = self._find_target(node["$ref"], location)
        raise UnsatisfiableSchema(f"'$ref' of the JSON schema at {location} refers to itself")

    def _lower_reference(self, pointer: object, location: str) -> Schema:
        target = self._find_target(pointer, location)
        assert isinstance(pointer, str)
        if pointer not in self._names:
            name = self._names[pointer] = f"r{len(self._names)}"
            self.definitions[name] = {}  # reserves the name: the target may refer to itself
            self.definitions[name] = self.lower(target, pointer)
        return {"$ref": f"#/$defs/{self._names[pointer]}"}

    def _find_target(self, pointer: object, location: str) -> object:
        if not isinstance(pointer, str) or not (pointer == "#" or pointer.startswith("#/")):
            raise InvalidRequest(
                f"'$ref' of the JSON schema at {location} must point into the schema itself, as in '#/$defs/name'"
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
                    f"'$ref' of the JSON schema at {location} points to {pointer[:80]!r}, which does not exist"
                )
        return node


def _unsupported(keyword: str, location: str, context: str = "") -> InvalidRequest:
    reason = f"is not supported {context}" if context else "is not supported"
    return InvalidRequest(f"'{keyword[:60]}' of the JSON schema at {location} {reason}; remove it")


def _alternatives(schemas: list[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _read_schemas(value: object, keyword: str, location: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(
            f"'{keyword}' of the JSON schema at {location} must be a non-empty list of schemas"
        )
    return value


def _find_finite(definitions: dict[str, Schema]) -> set[str]:
    """Return the names of the definitions that some finite value meets.

    They are the least fixed point: a definition is finite if its required parts refer to finite definitions only.
    """
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
