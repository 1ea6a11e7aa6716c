"""Steps with prompts, filled up to a size: the same tokens, and no trace of those that fill them up."""

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_driver import generate, make_engine
from tiny_models import make_model

from skiff_runtime.attention.base import AttentionBackend
from skiff_runtime.engine.prefill_graph import SIZES, PrefillGraphRunner, prefill_capture_sizes
from skiff_runtime.kernels import kv_store
from skiff_runtime.kernels import qk_norm_rope as heads

PROMPTS = [[5, 6, 7], list(range(20, 60)), [9] * 17, list(range(100, 40, -1)), [11] * 150]


def test_sizes_end_with_the_largest_step() -> None:
    assert prefill_capture_sizes(10) == [10]
    assert prefill_capture_sizes(200) == [64, 128, 192, 200]
    assert prefill_capture_sizes(1 << 20) == list(SIZES) == sorted(set(SIZES))


class Counted(PrefillGraphRunner):
    """Notes the sizes that it computes."""

    def __init__(self, runner: Any, *, tokens: int) -> None:
        super().__init__(runner, tokens=tokens)
        self.seen: set[int] = set()

    def _compute(self, size: int, backend: AttentionBackend) -> None:
        self.seen.add(size)
        super()._compute(size, backend)


@pytest.fixture
def dropping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch stores no K and V at a place below 0; that of a GPU leaves such tokens out."""

    def store(keys: Any, values: Any, pool: Any, slot_mapping: torch.Tensor) -> None:
        kept = slot_mapping >= 0
        kv_store.store_kv(keys[kept], values[kept], pool, slot_mapping[kept])

    monkeypatch.setattr(heads, "store_kv", store)


@pytest.mark.parametrize("budget", [24, 96, 1024])
def test_tokens_are_those_of_steps_that_are_not_filled_up(
    dropping: None, tmp_path: Path, budget: int
) -> None:
    engine = make_engine(make_model(tmp_path, "qwen3", seed=6), page_size=16)
    options: dict[str, Any] = {"page_size": 16, "budget": budget, "slots": 5}
    engine._prompts = None
    plain = generate(engine, PROMPTS, 8, **options)
    step = engine._prompts = Counted(engine._runner, tokens=160)
    filled = generate(engine, PROMPTS, 8, **options)
    engine.close()
    assert filled == plain
    assert step.seen and step.seen <= {64, 128, 160}
