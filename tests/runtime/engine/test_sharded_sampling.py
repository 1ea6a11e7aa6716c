"""Sampling by several ranks, each with a shard of the logits: the tokens of one rank over all of them, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest
import torch
from engine_driver import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_functions import compare_sampling
from rank_processes import on_ranks
from sampling_cases import SamplingCase, make_case, sample_case
from thread_ranks import ThreadRank, on_threads

from skiff_runtime.distributed.tensor_parallel import DetachedRank
from skiff_runtime.distributed.vocab_shard import VocabShard
from skiff_runtime.kernels.gumbel import add_gumbel
from skiff_runtime.kernels.sampling_keys import LOWEST_KEY, NAN_KEY, decode_tokens, encode_keys
from skiff_runtime.kernels.tuning import DEFAULT, overridden
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import NAN_LOGITS

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
    seed: int, rows: int, vocab: int, tp_size: int, tuning: object
) -> None:
    """Small vocabularies leave ranks with padding alone, large ones are cut where a row has its maximum, or NaN."""
    case = make_case(seed, rows, vocab)
    expected = sample_case(case, OWN_DEVICE)
    with overridden(tuning):
        found, _ = sample_on_threads(case, tp_size)
    assert found == [expected] * tp_size


@pytest.mark.parametrize("tp_size", [2, 3])
def test_processes_sample_the_tokens_of_one_rank(tmp_path: Path, tp_size: int) -> None:
    """The collectives are gloo's; every rank compares with what it samples alone."""
    results = on_ranks(tp_size, tmp_path, compare_sampling, 60)
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
    filters = [{"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}] * 2 + [{"top_k": 998}]
    harmless = [{"top_k": 1}, {"top_k": 999}, {"top_k": 1 << 40}, {"top_p": 0.5, "temperature": 0.0}]
    changes = filters + harmless
    samplings = [
        SamplingSpec(**{"max_tokens": 1, "seed": at, "temperature": 0.8, **change})
        for at, change in enumerate(changes)
    ]
    case = SamplingCase(case.logits, samplings + case.samplings[len(samplings) :], case.positions)
    expected, shard = [sample_case(case, OWN_DEVICE)] * tp_size, -(-999 // tp_size) * 4
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
            edges = [shard.start for shard in shards] + [shards[-1].stop]
            assert edges[0] == 0 and edges[-1] == vocab
            assert edges[1:] == [shard.stop for shard in shards]
            assert all(shard.start == min(rank * shard.size, vocab) for rank, shard in enumerate(shards))
