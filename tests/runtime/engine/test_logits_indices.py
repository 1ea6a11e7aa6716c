"""Behind the last layer's attention only those tokens go on whose logits are wanted, and nothing else changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import Driver, generate, make_engine
from tiny_models import FAMILIES, greedy_tokens, load_reference, make_model

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.engine.engine import Engine
from skiff_runtime.engine.forward_pass import Wanted
from skiff_runtime.engine.model_runner import ModelRunner
from skiff_runtime.kernels.step_inputs import StepInputs
from skiff_runtime.layers.mlp import GatedMLP
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import Logprobs

LAYERS = 3
PROMPTS = [list(range(10, 40)), list(range(200, 217)), [5], list(range(100, 190))]
ASKING = SamplingSpec(max_tokens=8, seed=1, temperature=0.0, prompt_logprobs=3)


def made(path: Path) -> Engine:
    """An engine that launches every step of prompts kernel by kernel, as it does large ones."""
    engine = make_engine(path, page_size=16)
    engine._prompts = None
    return engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=17)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = made(model)
    yield engine
    engine.close()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of an MLP is given."""
    counts: list[int] = []
    compute = GatedMLP.__call__

    def counted(self: GatedMLP, x: Any) -> torch.Tensor:
        counts.append(len(x))
        return compute(self, x)

    monkeypatch.setattr(GatedMLP, "__call__", counted)
    return counts


class Compared:
    """Computes each step twice, over a cache that knows nothing of its tokens: of all tokens, and of the wanted ones."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._forward_at = runner.forward_selected
        self.shares: set[str] = set()

    def __call__(self, inputs: StepInputs, attention: AttentionBatch, places: torch.Tensor) -> Wanted:
        whole = self._runner.forward(inputs, attention).at(places)
        cached = self._cached(inputs, forget=True)
        wanted = self._forward_at(inputs, attention, places)
        for part, expected in ((wanted.output, whole.output), (wanted.residual, whole.residual)):
            assert part.shape == (len(places), self._runner.hidden_size)
            assert (part - expected).norm() <= 1e-6 * expected.norm()
        assert torch.equal(self._cached(inputs), cached)
        tokens = len(inputs.token_ids)
        self.shares.add("none" if len(places) == 0 else "all" if len(places) == tokens else "some")
        return wanted

    def _cached(self, inputs: StepInputs, *, forget: bool = False) -> torch.Tensor:
        """K and V of the step's tokens in the last layer."""
        sides = self._runner.pool.tokens(LAYERS - 1)
        cached = torch.stack([side[inputs.slot_mapping] for side in sides])
        for side in sides:
            if forget:
                side[inputs.slot_mapping] = torch.nan
        return cached


@pytest.mark.parametrize("family", FAMILIES)
def test_wanted_tokens_are_those_of_a_whole_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    engine = made(make_model(tmp_path, family, seed=8))
    compared = Compared(engine._runner)
    monkeypatch.setattr(engine._runner, "forward_selected", compared)
    monkeypatch.setattr(engine, "_decode", None)
    generate(engine, PROMPTS, 3, page_size=16, budget=24, slots=3)
    engine.close()
    assert compared.shares == {"none", "some", "all"}


def test_the_last_mlp_is_given_what_is_wanted(engine: Engine, rows: list[int]) -> None:
    driver = Driver(engine, 16)
    first, second = driver.open(0, PROMPTS[0]), driver.open(1, PROMPTS[1])
    driver.step([(first, 30), (second, 10)])
    driver.step([(first, 1), (second, 7)], decode_rows=1)
    assert rows == [40, 40, 1, 8, 8, 2]


def test_a_chunk_of_which_nothing_is_wanted_leaves_its_keys_and_values(
    engine: Engine, model: Path, rows: list[int]
) -> None:
    driver = Driver(engine, 16)
    row = driver.open(0, PROMPTS[3])
    assert len(driver.step([(row, 50)]).tokens) == len(driver.step([(row, 30)]).tokens) == 0
    assert rows == [50, 50, 30, 30]
    driver.step([(row, 10)])
    driver.step([(row, 1)], decode_rows=1)
    assert row.output == greedy_tokens(load_reference(model), PROMPTS[3], 2)


def test_prompt_logprobs_are_the_same_beside_prompts_that_ask_for_none(
    engine: Engine, rows: list[int]
) -> None:
    """A step that tells of a prompt computes all tokens, and the next one, that tells of none, does not."""
    driver = Driver(engine, 16)
    alone = driver.step([(driver.open(0, PROMPTS[0], ASKING), 30)]).prompts[0].logprobs
    others = [driver.open(slot, PROMPTS[slot]) for slot in (1, 2, 3)]
    asking = driver.open(4, PROMPTS[0], ASKING)
    rows.clear()
    told = driver.step([(others[0], 17), (others[1], 1), (asking, 30), (others[2], 80)]).prompts
    assert [(chunk.slot, chunk.start) for chunk in told] == [(4, 1)]
    assert_same(told[0].logprobs, alone)
    assert driver.step([(asking, 1), (others[2], 10)], decode_rows=1).prompts == ()
    assert rows == [128, 128, 128, 11, 11, 2]


def assert_same(told: Logprobs, expected: Logprobs) -> None:
    np.testing.assert_allclose(told.chosen, expected.chosen, atol=1e-5)
    np.testing.assert_allclose(told.top, expected.top, atol=1e-5)
    assert np.array_equal(told.top_ids, expected.top_ids)
