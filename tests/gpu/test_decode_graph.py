"""Decode steps on a GPU, once warm, allocate nothing, and the host waits for nothing."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from bf16_engine import SETTINGS, make_wide_model
from engine_driver import GREEDY, Driver, Row, make_engine
from shared_prefix_probe import record_shared_steps

from skiff_runtime.engine.engine import Engine
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import StepHandle

pytestmark = pytest.mark.gpu

ROWS, STEPS = 12, 40
COUNTERS: Final = ("allocation.all.allocated", "num_device_alloc", "num_sync_all_streams")
SPIN: Final = 4_000_000_000
"""Cycles of the GPU: about two seconds."""
SAMPLINGS: Final = [
    GREEDY,
    SamplingSpec(max_tokens=STEPS, seed=1, temperature=0.8),
    SamplingSpec(max_tokens=STEPS, seed=2, temperature=1.0, min_p=0.05),
    SamplingSpec(max_tokens=STEPS, seed=3, temperature=0.9, top_k=20, top_p=0.9),
]


@pytest.mark.parametrize(("attention", "common"), [("triton", 0), ("triton", 128), ("flashinfer", 0)])
def test_decode_steps_allocate_nothing_and_wait_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str, common: int
) -> None:
    """The rows are sampled in every way and start new pages; their first ``common`` tokens are read once for all."""
    shared = record_shared_steps(monkeypatch)
    path = make_wide_model(tmp_path, "llama")
    sizes: dict[str, Any] = {
        "max_running_requests": 16,
        "max_total_tokens": 4096,
        "max_num_batched_tokens": 1024,
    }
    engine = make_engine(path, attention_backend=attention, **SETTINGS, **sizes)
    engine.warmup()
    driver = Driver(engine, SETTINGS["page_size"])
    rows = opened(driver, common)
    decode(driver, rows, 4)
    with strict(engine):
        before = counted()
        decode(driver, rows, STEPS)
        assert counted() == before
    assert bool(shared) is (common > 0)
    asleep = on_thread(engine, spin)
    in_flight = [driver.launch([(row, 1) for row in rows], decode_rows=ROWS) for _ in range(3)]
    assert not on_thread(engine, asleep.query), "the launches of three steps waited for the GPU"
    for handle in in_flight:
        handle.result()
    assert counted() == before
    engine.close()


def opened(driver: Driver, common: int) -> list[Row]:
    """Open rows and compute their prompts, whose first ``common`` tokens are the same, in the same pages."""
    random = np.random.default_rng(5)
    head = random.integers(2, 300, common).tolist()
    tails = [random.integers(2, 300, int(random.integers(1, 60))).tolist() for _ in range(ROWS)]
    first = driver.open(0, [*head, *tails[0]], SAMPLINGS[0])
    driver.step([(first, first.known)])
    rows = [
        driver.open(slot, [*head, *tails[slot]], SAMPLINGS[slot % 4], shared=first, cached=common)
        for slot in range(1, ROWS)
    ]
    driver.step([(row, row.known - row.done) for row in rows])
    return [first, *rows]


def decode(driver: Driver, rows: list[Row], count: int) -> None:
    """Run ``count`` steps, three of them in flight."""
    in_flight: deque[StepHandle] = deque()
    for _ in range(count):
        in_flight.append(driver.launch([(row, 1) for row in rows], decode_rows=len(rows)))
        if len(in_flight) > 3:
            in_flight.popleft().result()
    for handle in in_flight:
        handle.result()


def counted() -> list[int]:
    """Return the allocator's counters, for all graphs and threads."""
    stats = torch.cuda.memory_stats()
    return [stats[name] for name in COUNTERS]


@contextmanager
def strict(engine: Engine) -> Iterator[None]:
    """Make every wait for a stream, and every copy that waits, raise an error.

    Torch keeps this mode for the whole process (``c10::cuda::warning_state``). Waits for an event are not reported:
    the ring of staging buffers waits for its oldest one, and a step's result for its tokens.
    """
    probe = torch.ones(1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            on_thread(engine, probe.item)
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def on_thread(engine: Engine, call: Any) -> Any:
    """Call on the engine's thread, after all launched steps, on its stream."""
    return engine._thread.submit(call).result()


def spin() -> torch.cuda.Event:
    """Keep the GPU busy, and return an event that ends with it."""
    torch.cuda._sleep(SPIN)  # type: ignore[no-untyped-call]
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
