"""Structured outputs: the compiled grammar reaches rank 0; an invalid constraint is a 400."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from accepted_texts import accepted_texts
from frontend import NAME, Frontend, running_frontend, write_model

from skiff_runtime.messages import FinishReason

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
MESSAGES: list[Any] = [{"role": "user", "content": "x"}]


TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": {"type": "integer"}, "end": "</a>"}],
    "triggers": ["<a>"],
}
TEXTS = (
    "<a>1</a>",
    "<a>x</a>",
    "{}",
    '{"a": 1}',
    '{"a": "x"}',
    "12",
    "a",
    "abc",
    "ad",
    '"yes"',
    "yes",
    "no\n",
    "no",
    "東",
    "",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def front(model: Path) -> Iterator[Frontend]:
    with running_frontend(model) as front:
        yield front


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "json_object"}}, {"{}", '{"a": 1}', '{"a": "x"}'}),
        ({"response_format": FORMAT}, {'{"a": 1}'}),
        ({"guided_json": SCHEMA}, {'{"a": 1}'}),
        ({"guided_json": '{"type": "integer"}'}, {"12"}),
        ({"guided_regex": "[a-c]+"}, {"a", "abc"}),
        ({"guided_choice": ['"yes"', "no\n", "東"]}, {'"yes"', "no\n", "東"}),
        ({"guided_grammar": 'root ::= "a" | "b"'}, {"a"}),
        ({"regex": "[a-c]+"}, {"a", "abc"}),
        ({"ebnf": 'root ::= "a" | "b"'}, {"a"}),
        ({"structured_outputs": {"json": SCHEMA}}, {'{"a": 1}'}),
        ({"structured_outputs": {"json": '{"type": "integer"}', "disable_fallback": True}}, {"12"}),
        ({"structured_outputs": {"json_object": True}}, {"{}", '{"a": 1}', '{"a": "x"}'}),
        ({"structured_outputs": {"regex": "[a-c]+"}}, {"a", "abc"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"yes", "no"}),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, {"a"}),
        (
            {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
            {
                "a",
                "abc",
                "ad",
                "yes",
                "12",
                "no",
                "no\n",
                '"yes"',
                "東",
                "",
                '{"a": 1}',
                '{"a": "x"}',
                "{}",
                "<a>1</a>",
            },
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {
                        "type": "sequence",
                        "elements": [
                            {"type": "const_string", "value": "a"},
                            {"type": "regex", "pattern": "[b-d]*"},
                        ],
                    },
                }
            },
            {"a", "abc", "ad"},
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_each_constraint_reaches_the_engine_as_a_compiled_grammar(
    front: Frontend, model: Path, path: str, fields: dict[str, Any], expected: set[str]
) -> None:
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": "x"}
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(front.post, path, model=NAME, **body, **fields)
        request = front.rank.request()
        front.rank.start(request)
        front.rank.generate(request.uid, "a", FinishReason.STOP)
        assert reply.result().status_code == 200
    assert accepted_texts(model, request.grammar, TEXTS) == expected


def test_openai_client_reports_an_unsupported_schema(front: Frontend) -> None:
    client = openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(
        openai.BadRequestError, match="'uniqueItems' of the JSON schema at #/properties/a"
    ) as caught:
        client.chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "list",
                    "schema": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}},
                },
            },
        )
    assert caught.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"guided_regex": "("}, "parenthesis"),
        ({"guided_grammar": "root ::= nothing"}, "nothing"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "'guided_regex' and 'guided_choice' both constrain"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema' is missing"),
        ({"guided_json": SCHEMA, "ignore_eos": True}, "'ignore_eos' conflicts"),
        ({"guided_json": SCHEMA, "min_tokens": 3}, "'min_tokens' conflicts"),
        ({"guided_json": {"type": "object", "properties": {"a": False}, "required": ["a"]}}, "is false"),
        ({"guided_json": {"$ref": "#"}}, "no finite value"),
        ({"guided_regex": "x" * (300 << 10)}, "guided_regex"),
        ({"regex": "a", "structured_outputs": {"regex": "a"}}, "both constrain the output"),
        ({"structured_outputs": {}}, "needs exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "needs exactly one of"),
        ({"structured_outputs": {"json_object": False}}, "needs exactly one of"),
        (
            {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
            "'structured_outputs.whitespace_pattern' is not supported",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "is not a structural tag"),
        (
            {"response_format": {"type": "structural_tag", "structures": [TAG["structures"][0]]}},
            "'structures' and 'triggers'",
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "nothing"}}},
            "cannot be compiled",
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"},
                }
            },
            "the only style",
        ),
        (
            {
                "response_format": {
                    "type": "structural_tag",
                    "format": {"type": "json_schema", "json_schema": {}, "any_order": True},
                }
            },
            "'any_order' of a JSON schema",
        ),
        ({"guided_json": SCHEMA, "allowed_token_ids": [3]}, "'allowed_token_ids' conflicts"),
    ],
)
def test_invalid_constraint_is_refused(front: Frontend, fields: dict[str, Any], says: str) -> None:
    reply = front.post("/v1/chat/completions", model=NAME, messages=MESSAGES, **fields)
    assert reply.status_code == 400, reply.text
    assert says in reply.json()["error"]["message"]
