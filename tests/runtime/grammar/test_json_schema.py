"""The grammar of a JSON schema accepts valid values only, and a schema that no grammar can enforce is refused."""

import json
from typing import Any

import pytest
import xgrammar
from grammar_walker import Walker
from json_schemas import COUNT, varied_schemas
from jsonschema import Draft202012Validator

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.schema.ebnf import schema_to_ebnf
from skiff_runtime.grammar.schema.lowering import lower_schema


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Walker:
    return Walker(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("walks", "every"), [(1, 5), pytest.param(50, 1, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])]
)
def test_random_texts_under_the_grammar_are_valid(walker: Walker, walks: int, every: int) -> None:
    schemas = varied_schemas()
    assert len(schemas) == COUNT
    finished = {}
    for name, schema in [*schemas.items()][::every]:
        Draft202012Validator.check_schema(schema)
        validator = Draft202012Validator(schema)
        texts = list(walker.texts(schema, name, walks))
        for text in texts:
            fault = next(validator.iter_errors(json.loads(text)), None)
            assert fault is None, f"{name}: {text}: {fault.message}"
        finished[name] = len(texts)
    unfinished = [name for name, count in finished.items() if not count]
    assert len(unfinished) <= len(finished) // 10, unfinished


def accepts(schema: object, text: str) -> bool:
    grammar = xgrammar.Grammar.from_ebnf(schema_to_ebnf(schema))
    return bool(xgrammar.testing._is_grammar_accept_string(grammar, text))


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
         ['{"a":1}', '{"a": 1, "b": null}', '{"A": null}', "{ }"]),
        ({"type": "array", "items": {"type": "number"}}, ["[]", "[1, 2.5, -0.1e-3]"]),
        ({"type": "string"}, ['"é 🙂 \\n \\" \\\\ \\u0001"']),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": ["object", "null"], "properties": {"n": {"$ref": "#/$defs/n"}}}}},
         ["null", '{"n": {"n": null}}', "{}"]),
        ({"oneOf": [{"const": 1}, {"const": "b"}]}, ["1", '"b"']),
        ({"type": "object", "properties": {"p": {"type": "string", "pattern": "^a/b#c$"}}}, ['{"p": "a/b#c"}']),
        ({"type": "object", "properties": {"a~b/c": {"type": "integer"}, "d": {"$ref": "#/properties/a~0b~1c"}}}, ['{"d": 5}']),
    ],
)  # fmt: skip
def test_ordinary_values_are_accepted(schema: dict[str, Any], texts: list[str]) -> None:
    validator = Draft202012Validator(schema)
    for text in texts:
        validator.validate(json.loads(text))
        assert accepts(schema, text), text


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "null"}}, '{"\\u0061": null}'),
        ({"type": "string", "minLength": 1}, '"\t"'),
        ({"type": "string", "minLength": 1001}, '"' + "\x01" * 1001 + '"'),
        ({"minimum": 3}, "2"),
        ({"type": "object", "required": ["z"], "properties": {"a": {}}}, '{"a": 1}'),
        ({"type": "string", "enum": ["a", 1]}, "1"),
        ({"type": "object", "properties": {"a": {}}}, '{"b": 1}'),
    ],
)  # fmt: skip
def test_invalid_values_that_xgrammar_alone_accepts_are_rejected(schema: dict[str, Any], text: str) -> None:
    assert not accepts(schema, text)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"type": "array", "uniqueItems": True}, "'uniqueItems' .* at #"),
        ({"type": "array", "contains": {"type": "integer"}}, "'contains'"),
        ({"properties": {"a": {"not": {"type": "string"}}}}, "'not' of the JSON schema at #/properties/a"),
        ({"if": {}, "then": {}}, "'if'"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
        ({"type": "object", "unevaluatedProperties": False}, "'unevaluatedProperties'"),
        ({"type": "string", "frobnicate": 1}, "'frobnicate'"),
        ({"type": "string", "pattern": "^a", "maxLength": 3}, "'pattern' and 'maxLength'"),
        ({"type": "string", "format": "color"}, "'format' .* known are date"),
        ({"type": "string", "pattern": "("}, "not a valid regular expression"),
        ({"type": "string", "pattern": "(?=a)b"}, "group"),
        ({"type": "string", "pattern": '^"$'}, "quotation mark"),
        ({"type": "string", "pattern": "\\x22"}, "quotation mark"),
        ({"type": "string", "pattern": "\\bword"}, "uses .b"),
        ({"type": "number", "multipleOf": 0.1}, "'multipleOf'"),
        ({"type": "integer", "minimum": 1, "multipleOf": 5}, "'multipleOf'"),
        ({"type": "integer", "minimum": 10**20}, "beyond 2"),
        ({"type": "integer", "minimum": True}, "must be a number"),
        ({"type": "array", "items": [{}]}, "'prefixItems'"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "'minItems'"),
        ({"type": "object", "properties": {"a": {}}, "patternProperties": {"^b": {}}}, "cannot both"),
        ({"type": "object", "patternProperties": {"^a": {}, "b$": {}}}, "may match the same name"),
        ({"type": "object", "propertyNames": {"anyOf": [{"maxLength": 2}, {"const": "abc"}]}}, "'propertyNames'"),
        ({"type": "object", "minProperties": 2}, "'minProperties'"),
        ({"type": "object", "properties": {"a": {}}, "additionalProperties": False, "required": ["b"]}, "is false"),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 3}, "more properties than"),
        ({"type": "frob"}, "names the unknown type"),
        ({"type": 5}, "'type'"),
        ({"enum": []}, "'enum'"),
        ({"enum": [2**60]}, "beyond 2"),
        ({"type": "string", "const": 5}, "has the required type"),
        ({"const": "a", "minLength": 3}, "'minLength' beside"),
        ({"anyOf": []}, "'anyOf'"),
        ({"anyOf": [False]}, "any branch of 'anyOf'"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "may meet both branch 0 and branch 1"),
        ({"oneOf": [{"type": "integer"}, {"properties": {"a": {}}}]}, "may meet both"),
        ({"allOf": [{"properties": {"a": {}}, "additionalProperties": False}, {"properties": {"b": {}}}]}, "cannot be combined"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "no value has both types"),
        ({"$ref": "#/$defs/none"}, "does not exist"),
        ({"$ref": "https://example.org/schema"}, "must point into the schema itself"),
        ({"$ref": "#"}, "no finite value"),
        ({"properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no finite value"),
        (False, "is false"),
        (5, "must be an object or a boolean"),
    ],
)  # fmt: skip
def test_keyword_that_cannot_be_enforced_is_named(walker: Walker, schema: object, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        list(walker.texts(schema, "refused"))


def test_schema_that_would_grow_exponentially_is_refused() -> None:
    deep: dict[str, Any] = {"type": "string"}
    for _ in range(100):
        deep = {"type": "array", "items": deep}
    levels = {
        f"l{n}": {"allOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 9, "anyOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 9}
        for n in range(30)
    }
    wide = {"$ref": "#/$defs/l0", "$defs": {**levels, "l30": {"type": "string"}}}
    for bomb in (deep, wide):
        with pytest.raises(
            InvalidRequest, match=r"larger than|deeper than|cannot be combined|within another"
        ):
            lower_schema(bomb)
