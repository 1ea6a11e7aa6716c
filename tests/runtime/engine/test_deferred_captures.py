"""Graphs that are captured while requests run: the tokens are the same, and all ranks capture between the same steps."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from deferred_captures import DEFERRED, EARLY, serve_with_captures
from engine_driver import DEVICE
from rank_processes import on_ranks
from scheduler_bench import request
from serving_engine import serve
from tiny_models import make_model

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.messages import GenerateRequest, SamplingSpec
from skiff_runtime.scheduler import capture_schedule

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu", reason="on a GPU, tests/gpu/test_start.py captures real graphs"
)

OUTPUT: Final = 24
OPTIONS: Final[dict[str, Any]] = {"page_size": 16, "max_num_batched_tokens": 48, "max_running_requests": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama", seed=11)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_requests(count: int = 7) -> list[GenerateRequest]:
    random = np.random.default_rng(3)
    sampling = [
        SamplingSpec(max_tokens=OUTPUT, seed=uid, temperature=0.9 * (uid % 2)) for uid in range(count)
    ]
    return [
        request(uid, random.integers(2, 300, int(random.integers(1, 60))).tolist(), sampling[uid])
        for uid in range(count)
    ]


def test_captures_between_steps_leave_the_tokens_as_they_are(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_schedule, "CAPTURE_INTERVAL_STEPS", 5)
    expected = serve(model, make_requests(), **OPTIONS)
    served, captured = serve_with_captures(TensorParallelGroup(), model, make_requests(), OPTIONS)
    assert served.replies == expected.replies
    assert served.steps == expected.steps
    assert [size for size, _ in captured] == [*EARLY, *DEFERRED]
    assert {thread.partition("_")[0] for _, thread in captured} == {"engine"}
    assert served.graphs_pending[0] == len(DEFERRED)
    assert served.graphs_pending == sorted(served.graphs_pending, reverse=True)
    assert served.graphs_pending[-1] == 0
    assert served.lost_pages == 0


@pytest.mark.parametrize("overlap", [True, False])
def test_ranks_capture_in_lockstep(model: Path, tmp_path: Path, overlap: bool) -> None:
    options = {**OPTIONS, "disable_overlap_schedule": not overlap}
    alone = serve(model, make_requests(), **options)
    ranks = on_ranks(2, tmp_path, serve_with_captures, model, make_requests(), options)
    (first, captured), (second, other) = ranks
    assert captured == other
    assert [size for size, _ in captured][: len(EARLY)] == list(EARLY)
    assert len(captured) > len(EARLY) + 1
    assert first.checksum == second.checksum
    assert first.replies == second.replies
    assert [reply.finish for reply in first.replies.values()] == [
        reply.finish for reply in alone.replies.values()
    ]
