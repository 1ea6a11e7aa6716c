"""Sampling by several ranks, each with a shard of the logits: the tokens of one rank over all of them, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pytest
import torch
from engine_driver import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_functions import compare_sampling
from rank_processes import on_ranks
from sampling_cases import SamplingCase, make_case, open_sampler, sample_case, shard_logits
from thread_ranks import ThreadRank, on_threads

from skiff_runtime.attention.base import AttentionBatch
from skiff_runtime.distributed.tensor_parallel import DetachedRank
from skiff_runtime.distributed.vocab_shard import VocabShard
from skiff_runtime.engine.decode_graph import DecodeGraphRunner
from skiff_runtime.engine.forward_pass import ForwardPass
from skiff_runtime.engine.input_batch import SlotTables
from skiff_runtime.engine.staging_buffers import Columns, StagingBuffers
from skiff_runtime.kernels.constants import vocab_shard_size
from skiff_runtime.kernels.gumbel import add_gumbel
from skiff_runtime.kernels.sampling_keys import LOWEST_KEY, NAN_KEY, decode_tokens, encode_keys
from skiff_runtime.kernels.step_inputs import StepInputs
from skiff_runtime.kernels.tuning import DEFAULT, Tuning, overridden
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import NAN_LOGITS, StepPlan

OWN_DEVICE: Final = torch.device(DEVICE)
GATHERED, EXCHANGED = (replace(DEFAULT, row_exchange_min_rows=rows) for rows in (1 << 30, 1))
"""Filtered rows are gathered on every rank, or divided among the ranks."""


def sample_on_threads(case: SamplingCase, tp_size: int) -> tuple[list[list[int]], list[tuple[str, int]]]:
    """Return the tokens of every rank, and the collectives of all ranks, which must be the same."""

    def sample(group: ThreadRank) -> tuple[list[int], list[tuple[str, int]]]:
        shard = VocabShard(group, case.logits.shape[1])
        return sample_case(case, OWN_DEVICE, shard), group.exchanged

    tokens, exchanged = zip(*on_threads(tp_size, sample, OWN_DEVICE), strict=True)
    assert all(each == exchanged[0] for each in exchanged)
    return list(tokens), exchanged[0]


@settings(max_examples=250)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 40),
    vocab=st.one_of(st.integers(1, 40), st.sampled_from([101, 1000, 2049])),
    tp_size=st.sampled_from([2, 3, 4, 8]),
    tuning=st.sampled_from([GATHERED, EXCHANGED]),
)
def test_ranks_sample_the_tokens_of_one_rank(
    seed: int, rows: int, vocab: int, tp_size: int, tuning: Tuning
) -> None:
    """Small vocabularies leave ranks with padding alone, large ones are cut where a row has its maximum, or NaN."""
    case = make_case(seed, rows, vocab)
    expected = sample_case(case, OWN_DEVICE)
    with overridden(tuning):
        found, _ = sample_on_threads(case, tp_size)
    assert found == [expected] * tp_size


@pytest.mark.parametrize("tp_size", [2, pytest.param(3, marks=pytest.mark.matrix)])
def test_processes_sample_the_tokens_of_one_rank(tmp_path: Path, tp_size: int) -> None:
    """The collectives are gloo's; every rank compares with what it samples alone."""
    results = on_ranks(tp_size, tmp_path, compare_sampling, 60, device="cpu")
    assert all(result == {"rows": results[0]["rows"], "different": 0} for result in results)
    assert results[0]["rows"] > 1000


@pytest.mark.parametrize("tp_size", [2, 3, 4, 8])
def test_plain_rows_exchange_eight_bytes_each(tp_size: int) -> None:
    case = make_case(3, 32, 1000, filtered=False)
    found, exchanged = sample_on_threads(case, tp_size)
    assert found == [sample_case(case, OWN_DEVICE)] * tp_size
    assert exchanged == [("max", 8 * 32)]


@pytest.mark.parametrize("tp_size", [2, 3, 4, 8])
def test_whole_rows_are_exchanged_for_filtered_rows_alone(tp_size: int) -> None:
    """Seven of 20 rows have filters that drop tokens of a draw; the last of them is repeated for the ranks to be even."""
    case = make_case(4, 20, 999, filtered=False)
    filters: list[dict[str, Any]] = [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}]
    harmless: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_k": 999},
        {"top_k": 1 << 40},
        {"top_p": 0.5, "temperature": 0.0},
    ]
    changes = [*filters, *filters, {"top_k": 998}, *harmless]
    samplings = [
        SamplingSpec(**{"max_tokens": 1, "seed": at, "temperature": 0.8, **change})
        for at, change in enumerate(changes)
    ]
    case = SamplingCase(case.logits, samplings + case.samplings[len(samplings) :], case.positions)
    expected = [sample_case(case, OWN_DEVICE)] * tp_size
    shard = 4 * vocab_shard_size(999, tp_size)
    with overridden(GATHERED):
        found, exchanged = sample_on_threads(case, tp_size)
    assert found == expected
    assert exchanged == [("gather", 7 * shard), ("max", 13 * 8)]
    with overridden(EXCHANGED):
        found, exchanged = sample_on_threads(case, tp_size)
    own = -(-7 // tp_size)
    assert found == expected
    assert exchanged == [("exchange", own * tp_size * shard), ("gather", own * 4), ("max", 13 * 8)]


@given(seed=st.integers(0, 1 << 30), vocab=st.integers(1, 5000), first=st.integers(0, 5000))
def test_noise_of_a_shard_is_that_of_its_tokens(seed: int, vocab: int, first: int) -> None:
    """It is the same to the bit, wherever a token stands in the tensor."""
    first = min(first, vocab - 1)
    columns = torch.tensor([seed, -seed]), torch.tensor([7, seed])
    whole = add_gumbel(torch.zeros(2, vocab), *columns)
    part = add_gumbel(torch.zeros(2, vocab - first), *columns, first_token=first)
    assert torch.equal(part, whole[:, first:])


class GivenLogits:
    """A forward pass whose logits are given; a decode graph runner copies rows to its device and computes on a CPU."""

    device = OWN_DEVICE

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def empty_logits(self, rows: int) -> torch.Tensor:
        return torch.full((rows, self._logits.shape[1]), torch.nan, device=self.device)

    def forward(
        self, inputs: StepInputs, attention: AttentionBatch, lora_slots: torch.Tensor | None = None
    ) -> int:
        """Return the number of rows."""
        return len(inputs.seq_lens)

    def logits(self, rows: int, out: torch.Tensor) -> torch.Tensor:
        """Fill ``out`` with the given logits, and padding rows with NaN."""
        out.fill_(torch.nan)[: len(self._logits)] = self._logits[:rows]
        return out


class CopyingStaging(StagingBuffers):
    """Copies to the target on a CPU, too, where ``StagingBuffers`` leaves the numbers where they are."""

    def send(self, columns: Columns, target: torch.Tensor | None = None) -> torch.Tensor:
        sent = super().send(columns, target)
        return sent if target is None else target.copy_(sent.view(-1))


def run_decode_step(
    case: SamplingCase, rows: list[int], shard: VocabShard | None = None
) -> tuple[list[int], list[int], list[str]]:
    """Return the tokens of some rows of a case, those in the table, and the draws of the step."""
    slots = len(case.samplings)
    tables = SlotTables(slots, 64, 4, OWN_DEVICE)
    tables.staging = CopyingStaging(OWN_DEVICE)
    sampler = open_sampler(case, OWN_DEVICE, shard, spare_slots=1)
    logits = case.logits[rows]
    given = GivenLogits((logits if shard is None else shard_logits(logits, shard)).to(OWN_DEVICE))
    runner = DecodeGraphRunner(cast(ForwardPass, given), tables, sampler, rows=slots)
    draws: list[str] = []
    compute = runner.compute
    runner.compute = lambda part: (draws.append(part.kind), compute(part))[1]  # type: ignore[method-assign,func-returns-value]
    at, nothing = np.array(rows, np.int32), np.empty(0, np.int32)
    starts = np.array([case.positions[row] % 60 for row in rows], np.int32)
    plan = StepPlan(
        number=0,
        slots=at,
        starts=starts,
        lengths=np.ones(len(rows), np.int32),
        samples=np.ones(len(rows), np.bool_),
        decode_rows=len(rows),
        opened=(),
        page_slots=nothing,
        page_columns=nothing,
        page_ids=nothing,
    )
    _, _, tokens = runner.run(plan, np.flatnonzero(sampler.needs_whole_rows(at)))
    return tokens.tolist(), tables.tokens[at, starts + 1].tolist(), draws


@settings(max_examples=80)
@given(
    seed=st.integers(0, 1 << 30),
    filtered=st.booleans(),
    tp_size=st.sampled_from([2, 3, 8]),
    tuning=st.sampled_from([GATHERED, EXCHANGED]),
    data=st.data(),
)
def test_decode_step_on_ranks_gives_the_tokens_of_one_rank(
    seed: int, filtered: bool, tp_size: int, tuning: Tuning, data: st.DataObject
) -> None:
    """Any rows of a batch are padded to a size of the graphs; the draws are those that the rows need."""
    case = make_case(seed, 19, 101, filtered=filtered)
    rows = data.draw(st.lists(st.integers(0, 18), min_size=1, max_size=19, unique=True))
    tokens, table, _ = run_decode_step(case, rows)
    assert table == [max(token, 0) for token in tokens]

    def run(group: ThreadRank) -> tuple[list[int], list[int], list[str]]:
        return run_decode_step(case, rows, VocabShard(group, 101))

    with overridden(tuning):
        for found, appended, draws in on_threads(tp_size, run, OWN_DEVICE):
            assert (found, appended) == (tokens, table)
            if not filtered:
                assert draws == ["model", "draw"]
            assert draws[0] == "model" and set(draws[1:]) <= {"draw", "draw_whole"} and len(draws) > 1


NUMBERS = st.floats(width=32, allow_nan=False)


@given(st.lists(st.tuples(NUMBERS, st.integers(0, (1 << 31) - 1)), min_size=1, max_size=50))
def test_largest_key_is_that_of_the_best_score_and_the_lowest_token(choices: list[tuple[float, int]]) -> None:
    scores, tokens = (torch.tensor(column) for column in zip(*choices, strict=True))
    scores = scores.float()
    keys = encode_keys(scores, tokens)
    best = min(token for score, token in choices if score == max(score for score, _ in choices))
    assert int(decode_tokens(keys.max()[None])) == best
    assert decode_tokens(keys).tolist() == [token for _, token in choices]
    assert (keys > LOWEST_KEY).all() and (keys < NAN_KEY).all()


def test_key_of_nan_is_above_all_and_gives_no_token() -> None:
    nan = torch.tensor([0x7FC00000, 0x7F800001, -0x400000, -1], dtype=torch.int32).view(torch.float32)
    keys = encode_keys(nan, torch.tensor([0, 5, 1 << 30, (1 << 31) - 1]))
    assert keys.tolist() == [NAN_KEY] * 4
    assert decode_tokens(keys).tolist() == [NAN_LOGITS] * 4


def test_shards_have_the_same_size_and_cover_the_vocabulary() -> None:
    for vocab in (1, 2, 5, 37, 151_936, 128_256, 32_000):
        for tp_size in (1, 2, 3, 4, 8):
            shards = [VocabShard(DetachedRank(rank, tp_size), vocab) for rank in range(tp_size)]
            assert len({shard.size for shard in shards}) == 1
            assert tp_size == 1 or shards[0].size % 8 == 0, (
                "rows of logits must begin at multiples of 16 bytes"
            )
            assert -(-vocab // tp_size) <= shards[0].size < -(-vocab // tp_size) + 8
            edges = [shard.start for shard in shards] + [shards[-1].stop]
            assert edges[0] == 0 and edges[-1] == vocab
            assert edges[1:] == [shard.stop for shard in shards]
            assert all(shard.start == min(rank * shard.size, vocab) for rank, shard in enumerate(shards))
