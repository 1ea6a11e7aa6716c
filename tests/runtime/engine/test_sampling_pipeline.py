"""Special rows beside plain ones in the sampling pipeline: each gets its own token, and no other row changes."""

from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from engine_driver import make_engine
from sampling_cases import shard_logits
from thread_ranks import ThreadRank, on_threads
from tiny_models import make_model

from skiff_runtime.distributed.vocab_shard import VocabShard
from skiff_runtime.engine.grammar_masks import GrammarMaskManager
from skiff_runtime.engine.input_batch import SampledRows, SlotTables
from skiff_runtime.engine.logits_processors import LogitsProcessors
from skiff_runtime.engine.logprobs import LogprobsGatherer
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.engine.sampling_pipeline import SamplingPipeline
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.models.config import ModelConfig, read_model_config
from skiff_runtime.step import SlotOpened, StepResult

CPU: Final = torch.device("cpu")
REQUESTS: Final[list[dict[str, Any]]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logit_bias": ((3, 100.0),)},
    {"temperature": 1.3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 0.0, "logit_bias": ((9, 100.0),), "logprobs": 1},
]
SPECIAL: Final = [1, 3, 5]
PLAIN: Final = [0, 2, 4]
FILTERED: Final[list[dict[str, Any]]] = [
    {"temperature": 0.9, "top_p": 0.6},
    {"temperature": 0.8, "min_p": 0.2},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.0, "top_p": 0.8, "logit_bias": ((4, 2.0),), "frequency_penalty": 1.0},
    {"temperature": 1.0, "top_k": 3, "logprobs": 4, "repetition_penalty": 1.5},
]
RANKED: Final = REQUESTS + FILTERED + REQUESTS[::-1]
FILTERED_ALONE: Final = [4, 6, 7, 8, 12]
"""The rows of RANKED with filters that request nothing more."""
KNOWN: Final = 7
"""Number of known tokens of each row."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    path: Path = make_model(tmp_path_factory.mktemp("model"), "llama", seed=3)
    return read_model_config(path)


class Bench:
    """A sampling pipeline over opened slots, and the rows of all of them in reverse order."""

    def __init__(
        self, model: ModelConfig, requests: list[dict[str, Any]] = REQUESTS, shard: VocabShard | None = None
    ) -> None:
        count = len(requests)
        self.tables = SlotTables(count, 32, 4, CPU)
        self.sampler = Sampler(self.tables.padding_slot + 1, CPU, shard)
        processors = LogitsProcessors(
            self.tables.tokens, vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids
        )
        self.pipeline = SamplingPipeline(
            *(self.tables, self.sampler),
            logprobs=LogprobsGatherer(count),
            processors=processors,
            grammar_masks=GrammarMaskManager(count, model, threads=1),
        )
        slots = np.arange(count, dtype=np.int32)[::-1].copy()
        known = np.arange(KNOWN, dtype=np.int32)
        samplings = [SamplingSpec(max_tokens=9, seed=at, **each) for at, each in enumerate(requests)]
        self.pipeline.open(
            [
                SlotOpened(int(slot), known, sampling, 3)
                for slot, sampling in zip(slots, samplings, strict=True)
            ]
        )
        positions = np.full(count, KNOWN, dtype=np.int32)
        columns = torch.from_numpy(slots).long(), torch.from_numpy(positions).long()
        self.rows = SampledRows(*columns, slots, positions)

    def appended(self) -> list[int]:
        """Return the token table's entry at each row's next position."""
        cells: list[int] = self.tables.tokens[self.rows.slots, self.rows.positions].tolist()
        return cells


def draw_like_graph(bench: Bench, logits: torch.Tensor) -> torch.Tensor:
    """Return the tokens int32[S] that the decode graphs of a rank draw from its shard, and write them to the table.

    One draw is for all rows, the other one for the rows that need whole logits and are not sampled again.
    """
    rows, sampler = bench.rows, bench.sampler
    tokens = sampler.draw(logits, rows.slots, rows.positions, bench.tables.tokens).int()
    filtered = bench.pipeline.find_filtered(rows.host_slots)
    assert filtered.tolist() == FILTERED_ALONE
    indices = torch.from_numpy(filtered)
    part = rows.select(filtered, indices)
    whole = sampler.draw_whole(logits[indices], part.slots, part.positions)
    bench.tables.append(part, whole)
    tokens[indices] = whole.int()
    return tokens


def test_resample_changes_special_rows_alone(config: ModelConfig) -> None:
    """The tokens that a graph sampled for plain rows stay, whatever they are."""
    logits = torch.randn(len(REQUESTS), config.vocab_size, generator=torch.Generator().manual_seed(4))
    first, again = Bench(config), Bench(config)
    result = first.pipeline.sample(first.rows, logits.clone(), ()).result()
    tokens = result.tokens.tolist()
    assert tokens == first.appended()
    assert tokens[1] == 3 and tokens[5] == 9
    for row in (0, 3):
        assert tokens[row] == int(logits[row].argmax())
    alone = first.sampler.sample(logits.clone(), first.rows).tolist()
    assert [tokens[row] for row in PLAIN] == [alone[row] for row in PLAIN]
    graph = torch.full((len(REQUESTS),), 77, dtype=torch.int32)
    second = again.pipeline.resample(again.rows, logits.clone(), graph).result()
    assert [second.tokens[row] for row in SPECIAL] == [tokens[row] for row in SPECIAL]
    assert [second.tokens[row] for row in PLAIN] == [77] * len(PLAIN)
    assert [again.appended()[row] for row in SPECIAL] == [tokens[row] for row in SPECIAL]
    assert [again.appended()[row] for row in PLAIN] == [0] * len(PLAIN)
    for each in (result, second):
        assert each.logprob_rows.tolist() == [3, 5] and each.logprobs is not None
        known = logits[[3, 5]].log_softmax(-1)
        np.testing.assert_allclose(each.logprobs.token_logprobs, known[[0, 1], [tokens[3], 9]], atol=1e-5)


@pytest.mark.parametrize("tp_size", [2, 3, 8])
def test_ranks_sample_and_resample_like_one_rank(config: ModelConfig, tp_size: int) -> None:
    """Whether in one call, or after a decode graph's two draws and with special rows again; alike on every rank."""
    whole = torch.randn(len(RANKED), config.vocab_size, generator=torch.Generator().manual_seed(6)) * 3
    alone = Bench(config, RANKED)
    expected = alone.pipeline.sample(alone.rows, whole.clone(), ()).result()
    assert expected.logprobs is not None

    def sample(group: ThreadRank) -> list[tuple[Bench, StepResult]]:
        shard = VocabShard(group, config.vocab_size)
        first, again = Bench(config, RANKED, shard), Bench(config, RANKED, shard)
        own = shard_logits(whole, shard)
        return [
            (first, first.pipeline.sample(first.rows, own.clone(), ()).result()),
            (again, again.pipeline.resample(again.rows, own.clone(), draw_like_graph(again, own)).result()),
        ]

    for rank in on_threads(tp_size, sample):
        for bench, result in rank:
            assert result.tokens.tolist() == bench.appended() == expected.tokens.tolist()
            assert result.logprob_rows.tolist() == expected.logprob_rows.tolist()
            assert result.logprobs is not None
            for name in ("token_logprobs", "top_ids", "top_logprobs"):
                assert getattr(result.logprobs, name).tolist() == getattr(expected.logprobs, name).tolist()


def test_padding_slot_has_sampling_parameters_and_is_greedy(tmp_path: Path) -> None:
    """Padding rows of a graph read sampling parameters like all other rows."""
    engine = make_engine(make_model(tmp_path, "llama", seed=3))
    seeds, filters = engine._sampler.parameters
    engine.close()
    assert len(seeds) == len(filters) == len(engine._tables.tokens)
    assert not filters[engine._tables.padding_slot].any()
