"""Prefill steps padded to a capture size: the same tokens as without padding, and no K or V of padding tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import generate, make_engine
from tiny_models import make_model

from skiff_runtime.attention.base import AttentionBackend
from skiff_runtime.engine.prefill_graph import CAPTURE_SIZES, PrefillGraphRunner, prefill_capture_sizes
from skiff_runtime.kernels import kv_store
from skiff_runtime.kernels import qk_norm_rope as heads

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9] * 17, list(range(100, 40, -1)), [11] * 150]


def test_capture_sizes_end_with_the_largest_step() -> None:
    assert prefill_capture_sizes(10) == [10]
    assert prefill_capture_sizes(200) == [64, 128, 192, 200]
    assert prefill_capture_sizes(1 << 20) == list(CAPTURE_SIZES) == sorted(set(CAPTURE_SIZES))


class Recorder(PrefillGraphRunner):
    """Records the sizes that it computes."""

    def __init__(self, runner: Any, *, tokens: int) -> None:
        super().__init__(runner, tokens=tokens)
        self.seen: set[int] = set()

    def _compute(self, size: int, backend: AttentionBackend) -> None:
        self.seen.add(size)
        super()._compute(size, backend)


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip tokens whose KV offset is negative, as the GPU's kernel does; the reference would write to the end."""

    def store(keys: Any, values: Any, pool: Any, slot_mapping: torch.Tensor) -> None:
        kept = slot_mapping >= 0
        kv_store.store_kv(keys[kept], values[kept], pool, slot_mapping[kept])

    monkeypatch.setattr(heads, "store_kv", store)


@pytest.mark.parametrize("budget", [24, 96, 1024])
def test_padded_steps_generate_the_tokens_of_unpadded_ones(
    dropping: None, tmp_path: Path, budget: int
) -> None:
    engine = make_engine(make_model(tmp_path, "qwen3", seed=6), page_size=16)
    options: dict[str, Any] = {"page_size": 16, "budget": budget, "slots": 5}
    engine._prefill_graphs = None
    plain = generate(engine, PROMPTS, 8, **options)
    runner = engine._prefill_graphs = Recorder(engine._runner, tokens=160)
    padded = generate(engine, PROMPTS, 8, **options)
    engine.close()
    assert padded == plain
    assert runner.seen and runner.seen <= {64, 128, 160}
