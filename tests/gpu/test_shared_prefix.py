"""Decode rows that read a shared prefix together get the same tokens as without sharing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_driver import Driver, make_engine
from shared_prefix_probe import record_shared_steps
from tiny_models import make_model

pytestmark = pytest.mark.gpu

ROWS, COMMON, COUNT = 13, 384, 12
KINDS: list[dict[str, Any]] = [{}, {"disable_cuda_graph": True}, {"disable_cascade_attn": True}]


def test_tokens_do_not_depend_on_prefix_sharing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path, "llama", seed=7, hidden_size=256, intermediate_size=512, head_dim=64)
    shared_steps = record_shared_steps(monkeypatch)
    outputs = []
    for changes in KINDS:
        shared_steps.clear()
        outputs.append(tokens(path, **changes))
        assert bool(shared_steps) is ("disable_cascade_attn" not in changes)
    assert outputs[0] == outputs[1] == outputs[2]


def tokens(path: Path, **changes: Any) -> list[list[int]]:
    """Generate tokens of two groups of rows and of a single row, some of them in mixed batches."""
    engine = make_engine(
        path,
        device="cuda",
        max_model_len=512,
        max_running_requests=32,
        max_total_tokens=8192,
        max_num_batched_tokens=4096,
        **changes,
    )
    engine.warmup()
    driver, random = Driver(engine, 16), np.random.default_rng(3)
    heads = [random.integers(2, 300, COMMON).tolist() for _ in range(2)]
    first = [driver.open(slot, [*heads[slot], slot + 2]) for slot in range(2)]
    driver.step([(row, COMMON + 1) for row in first])
    rows = [
        driver.open(
            slot, [*heads[slot % 2], slot, 5, slot], shared=first[slot % 2], cached=COMMON - 128 * (slot == 5)
        )
        for slot in range(2, ROWS)
    ]
    rows.append(driver.open(ROWS, random.integers(2, 300, 40).tolist()))
    driver.step([(row, row.known - row.done) for row in rows])
    all_rows = [*first, *rows]
    late = driver.open(ROWS + 1, random.integers(2, 300, 60).tolist())
    for _ in range(COUNT):
        driver.step([*((row, 1) for row in all_rows), (late, 5)], decode_rows=len(all_rows))
    for _ in range(COUNT):
        driver.step([(row, 1) for row in all_rows], decode_rows=len(all_rows))
    engine.close()
    return [row.output for row in all_rows]
