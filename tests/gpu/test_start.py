"""Starts on a GPU: kept memory profiles, graphs that are captured while requests run, and memory that lacks for them."""

import json
import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
from bf16_engine import SETTINGS, make_wide_model, serve
from engine_driver import make_engine
from gpus import needs_gpus
from rank_processes import on_ranks
from scheduler_bench import request
from serving_engine import Served, serve_on_rank

from skiff_runtime.engine import engine as engine_module
from skiff_runtime.engine import memory_profile
from skiff_runtime.engine.decode_graph import DecodeGraphRunner, GraphPart
from skiff_runtime.engine.engine import Engine
from skiff_runtime.engine.free_memory import allocatable_bytes
from skiff_runtime.engine.graph_captures import CaptureTask
from skiff_runtime.engine.graph_memory import GraphMemory, MemoryProfile
from skiff_runtime.engine.memory_profile_cache import FOLDER
from skiff_runtime.engine.step_output import StepOutput
from skiff_runtime.messages import GenerateRequest, SamplingSpec
from skiff_runtime.scheduler import capture_schedule

pytestmark = pytest.mark.gpu

ROWS: Final = 40
OPTIONS: Final[dict[str, Any]] = {
    "max_running_requests": ROWS,
    "max_num_batched_tokens": 1024,
    "max_total_tokens": 16384,
    "max_model_len": 512,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_model(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    torch.cuda.empty_cache()
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note each measurement of graphs."""
    seen: list[str] = []
    measure = memory_profile._measure_all_graphs

    def record(*arguments: Any) -> tuple[GraphMemory, GraphMemory]:
        seen.append("graphs")
        return measure(*arguments)

    monkeypatch.setattr(memory_profile, "_measure_all_graphs", record)
    return seen


def make_requests(count: int = ROWS) -> list[GenerateRequest]:
    random = np.random.default_rng(5)
    samplings = [
        SamplingSpec(
            max_tokens=int(random.integers(20, 120)), seed=uid, temperature=0.8 * (uid % 2), ignore_eos=True
        )
        for uid in range(count)
    ]
    return [
        request(uid, random.integers(2, 300, int(random.integers(1, 90))).tolist(), samplings[uid])
        for uid in range(count)
    ]


def entry_of(directory: Path) -> Path:
    (entry,) = (directory / FOLDER).glob("*.json")
    return entry


def profile_of(directory: Path) -> MemoryProfile:
    content = json.loads(entry_of(directory).read_text())["profile"]
    return msgspec.convert(content, MemoryProfile)


def change_profile(directory: Path, **changes: Any) -> None:
    entry = entry_of(directory)
    content = json.loads(entry.read_text())
    content["profile"].update(changes)
    entry.write_text(json.dumps(content))


def start(model: Path, directory: Path, **changes: Any) -> Engine:
    """Start an engine that sizes its KV cache by the profile."""
    options = {**SETTINGS, **OPTIONS, "max_total_tokens": None, "mem_fraction_static": 0.5, **changes}
    return make_engine(model, kernel_cache_dir=str(directory), **options)


def test_second_start_measures_a_step_alone_and_has_as_many_pages(
    model: Path, tmp_path: Path, measured: list[str]
) -> None:
    pages = []
    for _ in range(2):
        engine = start(model, tmp_path)
        engine.warmup()
        pages.append(engine.num_pages)
        engine.close()
        del engine
        torch.cuda.empty_cache()
    assert measured == ["graphs"]
    assert abs(pages[1] - pages[0]) <= 0.02 * pages[0]


def test_other_options_measure_anew_and_the_flag_always(
    model: Path, tmp_path: Path, measured: list[str]
) -> None:
    for changes in (
        {},
        {"max_num_batched_tokens": 512},
        {},
        {"disable_memory_profile_cache": True},
        {"disable_memory_profile_cache": True},
    ):
        start(model, tmp_path, **changes).close()
    assert measured == ["graphs"] * 4
    assert len(list((tmp_path / FOLDER).iterdir())) == 2


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_profile_of_another_step_is_measured_anew(
    model: Path, tmp_path: Path, measured: list[str], share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_profile, "MAX_DEVIATION_BYTES", 1 << 20)  # the model is small
    start(model, tmp_path).close()
    true = profile_of(tmp_path)
    change_profile(tmp_path, activations=int(true.activations * share))
    start(model, tmp_path).close()
    assert measured == ["graphs"] * 2
    assert abs(profile_of(tmp_path).activations - true.activations) < 0.05 * true.activations


def test_profile_that_promises_too_little_leads_to_no_error(
    model: Path, tmp_path: Path, measured: list[str]
) -> None:
    """Graphs that take nothing, by the kept profile: the KV cache takes their memory, so they lack it."""
    options = {"mem_fraction_static": 0.99, "max_running_requests": 256, "max_num_batched_tokens": 8192}
    start(model, tmp_path, **options).close()
    nothing = {"runner": 0, "largest": 0, "further": 0, "count": 1}
    change_profile(tmp_path, decode_graphs=nothing, prefill_graphs=nothing)
    served = serve(
        model,
        make_requests(),
        defer_captures=True,
        kernel_cache_dir=str(tmp_path),
        max_total_tokens=None,
        max_model_len=512,
        **options,
    )
    assert all(reply.failed is None and reply.tokens for reply in served.replies.values())
    assert measured == ["graphs"]


def note_captures(captured: list[int], engine: Engine) -> None:
    """Append the size of each capture of the engine to ``captured``."""
    captures, run_task = engine._captures, engine._captures._run

    def record(task: CaptureTask) -> None:
        run_task(task)
        captured.append(task.size)

    captures._run = record  # type: ignore[method-assign]


def run(model: Path, captured: list[int], **changes: Any) -> Served:
    return serve(model, make_requests(), prepare=partial(note_captures, captured), **{**OPTIONS, **changes})


@pytest.mark.parametrize("interval", [1, 7])
def test_tokens_are_the_same_while_graphs_are_captured(
    model: Path, interval: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_schedule, "CAPTURE_INTERVAL_STEPS", interval)
    all_sizes: list[int] = []
    captured: list[int] = []
    expected = run(model, all_sizes)
    served = run(model, captured, defer_captures=True)
    assert served.graphs_pending[0] > 10
    assert served.graphs_pending[-1] < served.graphs_pending[0]
    assert captured == all_sizes[: len(captured)]
    if interval == 1:
        assert served.graphs_pending[-1] == 0
        assert captured == all_sizes
    assert served.replies == expected.replies
    assert served.lost_pages == 0


def test_only_the_largest_and_small_decode_graphs_are_captured_before_ready(model: Path) -> None:
    captured: list[int] = []
    engine = make_engine(model, **SETTINGS, **OPTIONS)
    note_captures(captured, engine)
    engine.warmup(defer_captures=True)
    pending = engine.num_deferred_graphs
    engine.close()
    assert captured[0] == ROWS
    assert sorted(set(captured[1:])) == [1, 2, 4, 8]
    assert pending > 10


def test_results_of_steps_may_be_dropped_during_a_capture(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler's thread drops them at any time, and the next step allocates pinned memory."""
    engine = make_engine(model, **SETTINGS, **OPTIONS)
    engine.warmup(defer_captures=True)
    compute = DecodeGraphRunner.compute

    def output() -> StepOutput:
        return StepOutput(torch.arange(ROWS, dtype=torch.int32, device="cuda"))

    def drop_and_compute(runner: DecodeGraphRunner, part: GraphPart) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            dropping = threading.Thread(target=outputs.clear)
            dropping.start()
            dropping.join()
        return compute(runner, part)

    monkeypatch.setattr(DecodeGraphRunner, "compute", drop_and_compute)
    outputs = [engine._thread.submit(output).result() for _ in range(3)]
    engine._thread.submit(engine._captures.capture_deferred).result()
    assert not outputs
    assert engine._thread.submit(output).result().result().tokens.tolist() == list(range(ROWS))
    engine.close()


def test_lack_of_memory_while_serving_gives_captures_up(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_schedule, "CAPTURE_INTERVAL_STEPS", 1)
    expected = run(model, [])
    calls: list[int] = []
    captured: list[int] = []

    def shrinking(device: torch.device) -> int:
        calls.append(1)
        return allocatable_bytes(device) if len(calls) < 5 else 0

    monkeypatch.setattr(engine_module, "allocatable_bytes", shrinking)
    served = run(model, captured, defer_captures=True)
    assert len([size for size in captured if 8 < size < ROWS]) <= 4
    assert len(calls) == 5
    assert served.replies == expected.replies


@needs_gpus(2)
def test_two_ranks_capture_and_keep_profiles_in_lockstep(model: Path, tmp_path: Path) -> None:
    options = {**SETTINGS, **OPTIONS, "kernel_cache_dir": str(tmp_path / "kernels"), "defer_captures": True}
    runs = [options, options]
    ranks = on_ranks(2, tmp_path, serve_on_rank, model, make_requests(), runs, device="cuda")
    for first, second in zip(*ranks, strict=True):
        assert first.checksum == second.checksum
        assert first.replies == second.replies
        assert first.graphs_pending == second.graphs_pending
    assert len(list((tmp_path / "kernels" / FOLDER).glob("*.json"))) == 2


def test_start_with_a_read_only_directory_is_no_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str]
) -> None:
    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, os.strerror(13), str(self))

    monkeypatch.setattr(Path, "write_bytes", refuse)
    for _ in range(2):
        start(model, tmp_path).close()
    assert measured == ["graphs"] * 2
