"""A model that computes NaN for one request: its row yields no token, and the other rows keep their tokens."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_driver import GREEDY, Driver, make_engine
from grammar_factory import GrammarFactory
from safetensors.torch import load_file, save_file
from tiny_models import make_model

from skiff_runtime.engine.engine import Engine
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import NAN_LOGITS

BROKEN = 77
"""Id of the token whose embedding is NaN."""
PROMPT = list(range(10, 31))
RANDOM = SamplingSpec(max_tokens=64, seed=4, temperature=0.9, top_p=0.9, logprobs=2, min_tokens=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_model(tmp_path_factory.mktemp("model"), "llama", seed=12, shard_size="1GB")
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    engine = make_engine(model, page_size=4)
    engine.warmup()
    yield engine
    engine.close()


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("guided", [False, True], ids=["free", "grammar"])
def test_rows_beside_a_nan_row_keep_their_tokens(
    model: Path, engine: Engine, sampling: SamplingSpec, guided: bool
) -> None:
    """This holds in the prefill step and in decode steps, which read the broken row's last token from the table."""
    grammar = GrammarFactory(model).regex("[a-z]{40}") if guided else None
    alone, together = Driver(engine, 4, seed=1), Driver(engine, 4, seed=2)
    lone = alone.open(0, PROMPT, sampling, grammar=grammar)
    alone.step([(lone, lone.known)])
    for _ in range(6):
        alone.step([(lone, 1)], decode_rows=1)
    rows = [
        together.open(1, [*PROMPT[:9], BROKEN, *PROMPT[9:]], sampling, grammar=grammar),
        together.open(0, PROMPT, sampling, grammar=grammar),
        together.open(2, [BROKEN], GREEDY),
    ]
    together.step([(row, row.known) for row in rows])
    for _ in range(6):
        together.step([(row, 1) for row in rows], decode_rows=3)
    assert rows[0].output == rows[2].output == [NAN_LOGITS] * 7
    assert rows[1].output == lone.output and min(lone.output) >= 0


def test_reused_page_with_stale_nan_gives_valid_tokens(engine: Engine) -> None:
    """NaN remains in the page after the end of the new sequence; attention must not multiply it, even by zero."""
    driver = Driver(engine, 4, seed=3)
    before = driver.open(0, PROMPT)
    driver.step([(before, before.known)])
    pages = engine.num_pages // 8
    for slot in range(8):
        broken = driver.open(slot, np.full(min(pages * 4, 200), BROKEN, np.int32).tolist())
        driver.step([(broken, broken.known)])
        driver.release(broken)
    for slot in range(8):
        row = driver.open(slot, PROMPT[: 5 + slot])
        driver.step([(row, row.known)])
        assert min(row.output) >= 0
