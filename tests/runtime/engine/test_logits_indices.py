"""After its attention the last layer computes only the tokens whose logits are needed, and nothing else changes."""

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
from skiff_runtime.engine.forward_pass import HiddenStates
from skiff_runtime.engine.model_runner import ModelRunner
from skiff_runtime.kernels.step_inputs import StepInputs
from skiff_runtime.layers.mlp import GatedMLP
from skiff_runtime.layers.partial_sum import LayerOutput
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import LogprobsOutput

LAYERS = 3
PROMPTS = [list(range(10, 40)), list(range(200, 217)), [5], list(range(100, 190))]
REQUESTING = SamplingSpec(max_tokens=8, seed=1, temperature=0.0, prompt_logprobs=3)


def make_unpadded_engine(path: Path) -> Engine:
    """Build an engine that computes prefill steps without padding, as it does large ones."""
    engine = make_engine(path, page_size=16)
    engine._prefill_graphs = None
    return engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "qwen3", seed=17)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = make_unpadded_engine(model)
    yield engine
    engine.close()


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens in each call of an MLP."""
    counts: list[int] = []
    compute = GatedMLP.__call__

    def counted(self: GatedMLP, x: Any) -> LayerOutput:
        counts.append(len(x))
        return compute(self, x)

    monkeypatch.setattr(GatedMLP, "__call__", counted)
    return counts


class Compared:
    """Computes each step twice, for all tokens and for the selected ones, and compares the results."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._forward_selected = runner.forward_selected
        self.shares: set[str] = set()

    def __call__(
        self, inputs: StepInputs, attention: AttentionBatch, logits_indices: torch.Tensor
    ) -> HiddenStates:
        whole = self._runner.forward(inputs, attention).select(logits_indices)
        cached = self._cached(inputs, forget=True)
        selected = self._forward_selected(inputs, attention, logits_indices)
        for part, expected in ((selected.output, whole.output), (selected.residual, whole.residual)):
            assert part.shape == (len(logits_indices), self._runner.hidden_size)
            assert (part - expected).norm() <= 1e-6 * expected.norm()
        assert torch.equal(self._cached(inputs), cached)
        tokens = len(inputs.token_ids)
        self.shares.add(
            "none" if len(logits_indices) == 0 else "all" if len(logits_indices) == tokens else "some"
        )
        return selected

    def _cached(self, inputs: StepInputs, *, forget: bool = False) -> torch.Tensor:
        """Return K and V of the step's tokens in the last layer; ``forget`` overwrites them with NaN."""
        sides = self._runner.pool.layer_kv(LAYERS - 1)
        cached = torch.stack([side[inputs.slot_mapping] for side in sides])
        for side in sides:
            if forget:
                side[inputs.slot_mapping] = torch.nan
        return cached


@pytest.mark.parametrize("family", FAMILIES)
def test_selected_tokens_equal_those_of_a_whole_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    engine = make_unpadded_engine(make_model(tmp_path, family, seed=8))
    compared = Compared(engine._runner)
    monkeypatch.setattr(engine._runner, "forward_selected", compared)
    monkeypatch.setattr(engine, "_decode_graphs", None)
    generate(engine, PROMPTS, 3, page_size=16, budget=24, slots=3)
    engine.close()
    assert compared.shares == {"none", "some", "all"}


def test_last_mlp_computes_only_selected_tokens(engine: Engine, rows: list[int]) -> None:
    driver = Driver(engine, 16)
    first, second = driver.open(0, PROMPTS[0]), driver.open(1, PROMPTS[1])
    driver.step([(first, 30), (second, 10)])
    driver.step([(first, 1), (second, 7)], decode_rows=1)
    assert rows == [40, 40, 1, 8, 8, 2]


def test_chunk_without_a_sampled_token_stores_its_kv(engine: Engine, model: Path, rows: list[int]) -> None:
    driver = Driver(engine, 16)
    row = driver.open(0, PROMPTS[3])
    assert len(driver.step([(row, 50)]).tokens) == len(driver.step([(row, 30)]).tokens) == 0
    assert rows == [50, 50, 30, 30]
    driver.step([(row, 10)])
    driver.step([(row, 1)], decode_rows=1)
    assert row.output == greedy_tokens(load_reference(model), PROMPTS[3], 2)


def test_prompt_logprobs_do_not_depend_on_other_prompts(engine: Engine, rows: list[int]) -> None:
    """A step with prompt log-probabilities computes all tokens; the next one, without them, does not."""
    driver = Driver(engine, 16)
    alone = driver.step([(driver.open(0, PROMPTS[0], REQUESTING), 30)]).prompt_logprobs[0].logprobs
    others = [driver.open(slot, PROMPTS[slot]) for slot in (1, 2, 3)]
    requesting = driver.open(4, PROMPTS[0], REQUESTING)
    rows.clear()
    chunks = driver.step([(others[0], 17), (others[1], 1), (requesting, 30), (others[2], 80)]).prompt_logprobs
    assert [(chunk.slot, chunk.start) for chunk in chunks] == [(4, 1)]
    assert_same(chunks[0].logprobs, alone)
    assert driver.step([(requesting, 1), (others[2], 10)], decode_rows=1).prompt_logprobs == ()
    assert rows == [128, 128, 128, 11, 11, 2]


def assert_same(found: LogprobsOutput, expected: LogprobsOutput) -> None:
    np.testing.assert_allclose(found.token_logprobs, expected.token_logprobs, atol=1e-5)
    np.testing.assert_allclose(found.top_logprobs, expected.top_logprobs, atol=1e-5)
    assert np.array_equal(found.top_ids, expected.top_ids)
