"""docs/api.md tells of every parameter that there is, and names tests that exist."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from skiff_runtime.api.schemas.request_bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateBody,
    Strict,
)

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text()
ENDPOINTS: dict[str, type[Strict]] = {"C": ChatCompletionRequest, "T": CompletionRequest, "N": GenerateBody}


def rows() -> Iterator[list[str]]:
    """The cells of the table of parameters."""
    table = PAGE.partition("## Parameters of generation")[2].partition("\n### ")[0]
    for line in table.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_every_parameter_is_told(endpoint: str) -> None:
    kind = ENDPOINTS[endpoint]
    told = [
        name for names, on, *_ in rows() if endpoint in on.split() for name in re.findall("`(.*?)`", names)
    ]
    assert sorted(told) == sorted(kind.model_fields)


def test_each_is_served_or_refused_and_has_a_test() -> None:
    for names, _, how, test in rows():
        assert how.startswith(("served", "refused")), names
        assert "::" in test, names


def test_the_tests_it_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE))
    assert len(named) > 30
    for file, function in sorted(named):
        tree = ast.parse((ROOT / "tests" / "runtime" / file).read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, file
