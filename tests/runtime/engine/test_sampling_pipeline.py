"""Rows that ask for more than a draw, beside rows that do not: each gets its own token, and no other row is touched."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from engine_driver import make_engine
from tiny_models import make_model

from skiff_runtime.engine.grammar_masks import GrammarMaskManager
from skiff_runtime.engine.input_batch import SampledRows, SlotTables
from skiff_runtime.engine.logits_processors import LogitsProcessors
from skiff_runtime.engine.logprobs import LogprobsGatherer
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.engine.sampling_pipeline import SamplingPipeline
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.models.config import ModelConfig, read_model_config
from skiff_runtime.step import SlotOpened

CPU: Final = torch.device("cpu")
WISHES: Final[list[dict[str, Any]]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": ((3, 100.0),)},
    {"temperature": 1.3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 0.0, "logit_bias": ((9, 100.0),), "logprobs": 1},
]
ASKING: Final = [1, 3, 5]
PLAIN: Final = [0, 2, 4]
BEFORE: Final = 7
"""Known tokens of each row."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path: Path = make_model(tmp_path_factory.mktemp("model"), "llama", seed=3)
    return read_model_config(path)


class Bench:
    """A choice over slots that were opened, and the rows of all of them in reverse order."""

    def __init__(self, model: ModelConfig) -> None:
        count = len(WISHES)
        self.tables = SlotTables(count, 32, 4, CPU)
        self.sampler = Sampler(self.tables.nobody + 1, CPU)
        edits = LogitsProcessors(
            self.tables.tokens, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )
        self.choice = SamplingPipeline(
            *(self.tables, self.sampler),
            logprobs=LogprobsGatherer(count),
            edits=edits,
            guide=GrammarMaskManager(count, model, threads=1),
        )
        slots = np.arange(count, dtype=np.int32)[::-1].copy()
        known = np.arange(BEFORE, dtype=np.int32)
        samplings = [SamplingSpec(max_tokens=9, seed=at, **wishes) for at, wishes in enumerate(WISHES)]
        self.choice.open(
            [
                SlotOpened(int(slot), known, sampling, 3)
                for slot, sampling in zip(slots, samplings, strict=True)
            ]
        )
        positions = np.full(count, BEFORE, dtype=np.int32)
        columns = torch.from_numpy(slots).long(), torch.from_numpy(positions).long()
        self.rows = SampledRows(*columns, slots, positions)

    def written(self) -> list[int]:
        """What stands in each row's next place."""
        cells: list[int] = self.tables.tokens[self.rows.slots, self.rows.positions].tolist()
        return cells


def test_all_at_once_and_those_that_ask_again(config: ModelConfig) -> None:
    """What a graph has chosen for the others stays as it is, whatever that was."""
    logits = torch.randn(len(WISHES), config.vocab_size, generator=torch.Generator().manual_seed(4))
    first, again = Bench(config), Bench(config)
    result = first.choice.choose(first.rows, logits.clone(), ()).result()
    tokens = result.tokens.tolist()
    assert tokens == first.written()
    assert tokens[1] == 3 and tokens[5] == 9
    for row in (0, 3):
        assert tokens[row] == int(logits[row].argmax())
    alone = first.sampler.sample(logits.clone(), first.rows).tolist()
    assert [tokens[row] for row in PLAIN] == [alone[row] for row in PLAIN]
    graph = torch.full((len(WISHES),), 77, dtype=torch.int32)
    second = again.choice.resample(again.rows, logits.clone(), graph).result()
    assert [second.tokens[row] for row in ASKING] == [tokens[row] for row in ASKING]
    assert [second.tokens[row] for row in PLAIN] == [77] * len(PLAIN)
    assert [again.written()[row] for row in ASKING] == [tokens[row] for row in ASKING]
    assert [again.written()[row] for row in PLAIN] == [0] * len(PLAIN)
    for told in (result, second):
        assert told.logprob_rows.tolist() == [3, 5] and told.logprobs is not None
        known = logits[[3, 5]].log_softmax(-1)
        np.testing.assert_allclose(told.logprobs.chosen, known[[0, 1], [tokens[3], 9]], atol=1e-5)


def test_nobody_has_parameters_and_is_greedy(tmp_path: Path) -> None:
    """Rows of nobody fill a graph's batch, and read them like all others."""
    engine = make_engine(make_model(tmp_path, "llama", seed=3))
    seeds, filters = engine._sampler.parameters
    engine.close()
    assert len(seeds) == len(filters) == len(engine._tables.tokens)
    assert not filters[engine._tables.nobody].any()
