"""Sampling from shards on two GPUs: the tokens of one rank over all logits, in the decode graphs and outside of them."""

from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
from bf16_engine import SETTINGS, make_wide_model
from gpus import ON_GPU, needs_gpus
from rank_functions import compare_sampling, sampled_with_every_parameter
from rank_processes import on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_GPU, reason="needs SKIFF_TEST_DEVICE=cuda"),
    needs_gpus(2),
]

TIMEOUT_SECONDS: Final = 600.0
STEPS: Final = 24


def test_ranks_sample_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """Both ranks compare what they sample from shards, by NCCL, with what they sample from whole rows."""
    results = on_ranks(2, tmp_path, compare_sampling, 200, timeout_seconds=TIMEOUT_SECONDS)
    assert [result["different"] for result in results] == [0, 0]
    assert results[0]["rows"] > 3000


@pytest.mark.parametrize("exchange_min_rows", [1, 1000], ids=["divided", "gathered"])
def test_tokens_are_the_same_with_and_without_graphs_on_both_ranks(
    tmp_path: Path, exchange_min_rows: int
) -> None:
    """The graph draws for all rows; rows with filters, processors, grammars and log-probabilities are sampled again."""
    path = make_wide_model(tmp_path / "model", "llama", seed=5)
    found: list[dict[str, Any]] = []
    for eager in (False, True):
        settings = {**SETTINGS, "device": "cuda", "disable_cuda_graph": eager}
        settings.pop("page_size", None)
        arguments = (path, STEPS, exchange_min_rows, settings)
        first, second = on_ranks(
            2,
            tmp_path / str(eager),
            sampled_with_every_parameter,
            *arguments,
            timeout_seconds=TIMEOUT_SECONDS,
        )
        assert first == second
        found.append(first)
    assert found[0] == found[1]
    assert Counter(map(len, found[0]["tokens"])) == {STEPS + 1: len(found[0]["tokens"])}
