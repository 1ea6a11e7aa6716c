"""docs/api.md describes every parameter of the generation endpoints, and api_tests.toml names a test of each statement."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from skiff_runtime.api.schemas.field_support import Support, support_of
from skiff_runtime.api.schemas.messages_request import CountTokensRequest, MessagesRequest
from skiff_runtime.api.schemas.request_bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateBody,
    StrictModel,
)
from skiff_runtime.api.schemas.responses_request import ResponsesRequest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/api.md").read_text()
NAMED_TESTS = tomllib.loads((Path(__file__).parent / "api_tests.toml").read_text())
ENDPOINTS: dict[str, type[StrictModel]] = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "generate": GenerateBody,
}


def documented_parameters() -> Iterator[tuple[str, str, Support]]:
    """Yield each parameter of the page's table with the endpoints and the support of its row."""
    section = PAGE.partition("## Parameters of generation")[2].partition("\n### ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            names, endpoints, support, _ = (cell.strip() for cell in line.strip("|").split(" | "))
            yield from ((name, endpoints, Support(support)) for name in re.findall("`(.*?)`", names))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_parameter_is_documented(endpoint: str) -> None:
    """With its support, which the field itself declares."""
    documented = [
        (name, support)
        for name, endpoints, support in documented_parameters()
        if endpoint in endpoints or endpoints == "all"
    ]
    fields = ENDPOINTS[endpoint].model_fields
    assert sorted(documented) == sorted((name, support_of(field)) for name, field in fields.items())


def documented_response_fields() -> Iterator[tuple[str, str]]:
    """Yield each field in the page's table of the Responses API, and how it is treated."""
    section = PAGE.partition("## The Responses API")[2].partition("\n### ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            names, treatment, _ = line.strip("|").split(" | ", 2)
            yield from ((name, treatment) for name in re.findall("`(.*?)`", names))


def test_every_field_of_the_responses_api_is_documented_and_names_a_test() -> None:
    fields = ResponsesRequest.model_fields.items()
    declared = {field.alias or name: support_of(field) for name, field in fields}
    assert sorted(documented_response_fields()) == sorted(declared.items())
    assert set(NAMED_TESTS["responses"]) == set(declared)


def test_every_documented_parameter_names_a_test() -> None:
    assert set(NAMED_TESTS["parameters"]) == {name for name, *_ in documented_parameters()}


def documented_messages_fields() -> Iterator[tuple[str, bool, str]]:
    """Yield each field of the Messages API in the page's table: name, if count_tokens has it, and how it is treated."""
    section = PAGE.partition("## Anthropic's Messages API")[2].partition("\n### ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            names, treatment, _ = (cell.strip() for cell in line.strip("|").split("| ", 2))
            assert treatment in ("served", "hint", "refused")
            yield from ((name, bool(star), treatment) for name, star in re.findall(r"`(\w+)`(\*?)", names))


def test_every_field_of_the_messages_api_is_documented() -> None:
    documented = list(documented_messages_fields())
    assert sorted(name for name, _, _ in documented) == sorted(MessagesRequest.model_fields)
    counted = {name for name, is_counted, _ in documented if is_counted}
    assert counted == set(CountTokensRequest.model_fields)
    assert set(NAMED_TESTS["messages_api"]) == {name for name, _, _ in documented}
    declared = {name: support_of(field) for name, field in MessagesRequest.model_fields.items()}
    assert {name: treatment for name, _, treatment in documented} == declared


def test_the_named_tests_exist() -> None:
    named = {test for section in NAMED_TESTS.values() for tests in section.values() for test in tests}
    assert len(named) > 30
    for test in sorted(named):
        file, _, function = test.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
