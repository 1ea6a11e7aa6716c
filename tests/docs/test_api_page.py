"""docs/api.md describes every parameter of the endpoints that compute, and api_tests.toml names a test of each statement."""

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from skiff_runtime.api.schemas.pooling_bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from skiff_runtime.api.schemas.request_bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateBody,
    StrictModel,
)

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/api.md").read_text()
NAMED_TESTS = tomllib.loads((Path(__file__).parent / "api_tests.toml").read_text())
ENDPOINTS: dict[str, type[StrictModel]] = {
    "chat": ChatCompletionRequest,
    "completions": CompletionRequest,
    "generate": GenerateBody,
    "embeddings": EmbeddingRequest,
    "rerank": RerankRequest,
    "score": ScoreRequest,
}
SECTIONS = {"parameters": "Parameters of generation", "pooling": "Embeddings, reranking, scores"}
"""Headings of the page by the sections of api_tests.toml."""


def documented_parameters(name: str) -> Iterator[tuple[str, str]]:
    """Yield each parameter of the tables of one section with the endpoints of its row."""
    section = re.split(r"\n##+ ", PAGE.partition(f"## {SECTIONS[name]}\n")[2])[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            names, endpoints, _ = (cell.strip() for cell in line.strip("|").split(" | "))
            yield from ((name, endpoints) for name in re.findall("`(.*?)`", names))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_parameter_is_documented(endpoint: str) -> None:
    section = "pooling" if endpoint in ("embeddings", "rerank", "score") else "parameters"
    documented = [
        name
        for name, endpoints in documented_parameters(section)
        if endpoint in endpoints or endpoints == "all"
    ]
    assert sorted(documented) == sorted(ENDPOINTS[endpoint].model_fields)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_documented_parameter_names_a_test(section: str) -> None:
    assert set(NAMED_TESTS[section]) == {name for name, _ in documented_parameters(section)}


def test_the_named_tests_exist() -> None:
    named = {test for section in NAMED_TESTS.values() for tests in section.values() for test in tests}
    assert len(named) > 30
    for test in sorted(named):
        file, _, function = test.partition("::")
        tree = ast.parse((TESTS / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test
