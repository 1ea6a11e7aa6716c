"""Random requests get the same tokens and log-probabilities alone and in a crowd."""

import json
import os
from pathlib import Path
from typing import Final

import pytest
from differential import Comparison, compare
from tiny_models import make_model

SHORT: Final = 60
FULL: Final = int(os.environ.get("SKIFF_TEST_DIFFERENTIAL_REQUESTS", "2000"))
MOST_TIES: Final = 0.002
"""Of all answers, beyond one."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


def check(found: Comparison) -> None:
    """Nothing but ties differs, though the crowd shared prefixes, mixed its steps and was short of memory."""
    different = {"ties": found.ties, "different": len(found.differences)}
    print(json.dumps({"differential": found.count, **found.counters, **different}))
    assert found.differences == []
    assert found.ties <= 1 + MOST_TIES * found.count
    assert [name for name, value in found.counters.items() if value == 0] == []


def test_alone_and_in_a_crowd(model: Path) -> None:
    check(compare(model, SHORT))


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("tp", [1, 2])
def test_alone_and_in_a_crowd_at_length(model: Path, tp: int) -> None:
    """With two ranks, each step waits for the network seven times, so fewer do."""
    check(compare(model, FULL if tp == 1 else FULL // 4, tp=tp))
