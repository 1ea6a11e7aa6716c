"""The compiled all-reduce kernels on one GPU, whose streams are the ranks, and on two GPUs."""

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from all_reduce_gpu_ranks import exchange, leave_alone, sum_fuse_and_replay, wait_alone
from compiling import run_compiling
from rank_processes import on_ranks

from skiff_runtime.distributed.copy_exchange import EXCHANGE_RANKS

pytestmark = pytest.mark.gpu

SCRIPT: Final = str(Path(__file__).parents[1] / "support/all_reduce_streams.py")
four_gpus = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def run_streams(*words: str) -> dict[str, Any]:
    done = run_compiling(SCRIPT, *words, variables={"CUDA_DEVICE_MAX_CONNECTIONS": "32"})
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 4000), (3, 1000), (4, 2000), (8, 1000)])
def test_thousands_of_rounds_of_streams_have_the_right_bits(ranks: int, rounds: int) -> None:
    """Eager calls and graph replays of all kernels and sizes in one order, each rank late at times."""
    found = run_streams(str(ranks), str(rounds), "0")
    assert found["failed"] == [False] * ranks
    assert found["wrong"] == [0] * ranks
    assert all(count > rounds // 20 for count in found["counts"].values()), found["counts"]
    assert all(epochs == found["epochs"][0] for epochs in found["epochs"])


def test_kernel_without_peers_gives_up_and_the_next_one_does_not_wait() -> None:
    assert run_streams("timeout") == {"failed": True, "reported": [1, 3]}


def test_late_rank_completes_what_was_sent_in_whole_and_times_out() -> None:
    """It finds nothing of the later calls that the other rank has run meanwhile, and reports as well."""
    right, failed = [True, False], [False, True]
    assert run_streams("late") == {
        "words": [right, failed, failed],
        "one-shot": [right, failed, failed],
        "two-shot": [failed, failed, failed],
        "fused one-shot": [right, failed, failed],
        "product": [right, failed, failed],
    }


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(2, marks=two_gpus), pytest.param(4, marks=four_gpus)],
    ids=lambda ranks: f"{ranks} GPUs",
)
def test_sums_on_several_gpus_are_the_same_bits_everywhere(tmp_path: Path, ranks: int) -> None:
    """Every algorithm, slices of a message larger than the buffers, NCCL between, graphs, and the fused norm."""
    first, *others = on_ranks(ranks, tmp_path, sum_fuse_and_replay, device="cuda")
    assert others == [first] * (ranks - 1)
    assert first["wrong"] == []
    copied = {"COPY_ENGINES"} if ranks == EXCHANGE_RANKS else set()
    assert set(first["algorithms"]) == {"LOW_LATENCY", "ONE_SHOT", "TWO_SHOT", "NCCL"} | copied


@two_gpus
def test_copy_engines_exchange_whole_messages_and_chunks_of_products(tmp_path: Path) -> None:
    """Hundreds in a row while a rank is late, in float32, bfloat16 and FP8, eagerly and in graphs."""
    first, second = on_ranks(2, tmp_path, exchange, device="cuda")
    assert first == second
    assert first["wrong"] == []


@two_gpus
def test_barrier_without_the_other_rank_reports_and_goes_on_waiting(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, wait_alone, str(tmp_path), device="cuda")
    assert "barrier of an exchange by copy engines: this rank waited" in first["error"] and first["waited"]
    assert second == {"error": None, "waited": None}


@two_gpus
def test_rank_left_alone_on_two_gpus_reports_the_collective(tmp_path: Path) -> None:
    first, second = on_ranks(2, tmp_path, leave_alone, device="cuda")
    assert "one-shot all-reduce (LL): this rank waited" in first["error"]
    assert second["error"] is None
