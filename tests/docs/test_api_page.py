"""docs/api.md describes every parameter of the generation endpoints, and api_tests.toml names a test of each statement."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def documented_parameters() -> Iterator[tuple[str, str]]:
    """Yield each parameter of the page's two tables with the endpoints of its row."""
    section = PAGE.partition("## Parameters of generation")[2].partition("\n### ")[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            names, endpoints, _ = (cell.strip() for cell in line.strip("|").split(" | "))
            yield from ((name, endpoints) for name in re.findall("`(.*?)`", names))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_parameter_is_documented(endpoint: str) -> None:
    documented = [
        name for name, endpoints in documented_parameters() if endpoint in endpoints or endpoints == "all"
    ]
    assert sorted(documented) == sorted(ENDPOINTS[endpoint].model_fields)


def documented_response_fields() -> list[str]:
    section = PAGE.partition("## The Responses API")[2].partition("\n### ")[0]
    rows = [line.strip("|").split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    return [name for names in rows for name in re.findall("`(.*?)`", names)]


def test_every_field_of_the_responses_api_is_documented_and_names_a_test() -> None:
    declared = [field.alias or name for name, field in ResponsesRequest.model_fields.items()]
    assert sorted(documented_response_fields()) == sorted(declared)
    assert set(NAMED_TESTS["responses"]) == set(declared)


def test_every_documented_parameter_names_a_test() -> None:
    assert set(NAMED_TESTS["parameters"]) == {name for name, _ in documented_parameters()}


def test_the_named_tests_exist() -> None:
    named = {test for section in NAMED_TESTS.values() for tests in section.values() for test in tests}
    assert len(named) > 30
    for test in sorted(named):
        file, _, function = test.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
