"""The kernels that sample from shards, against the kernels for whole rows: in Triton's interpreter, or on a GPU."""

from collections.abc import Iterator
from typing import Final, TypedDict

import pytest
import torch
from kernel_device import DEVICE, combine
from numpy.random import default_rng
from sampling_cases import make_case, shard_logits

from skiff_runtime.distributed.tensor_parallel import DetachedRank
from skiff_runtime.distributed.vocab_shard import VocabShard
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.kernels import sampling
from skiff_runtime.kernels.sampling_keys import NAN_KEY
from skiff_runtime.kernels.triton.sampling import sample_shard, sample_tokens
from skiff_runtime.kernels.tuning import tuning_for
from skiff_runtime.step import NAN_LOGITS, SlotOpened

BLOCK: Final = tuning_for(DEVICE).sampling_block
ROWS: Final = 24
Columns = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    # NumPy, in Triton's interpreter, warns of NaN.
    pytest.mark.filterwarnings("ignore:.*:RuntimeWarning"),
]


class Tokens(TypedDict):
    """The arguments of ``find_best_keys`` that say which tokens the logits are of."""

    first_token: int
    vocab_size: int


def make_rows(vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, Columns]:
    """Return logits of every kind, and the slots, positions, seeds and parameters of rows without filters."""
    case = make_case(5, ROWS, vocab, filtered=False)
    sampler = Sampler(ROWS, torch.device("cpu"))
    nothing = default_rng(0).integers(0, 1, 0).astype("int32")
    sampler.open([SlotOpened(slot, nothing, each, 0) for slot, each in enumerate(case.samplings)])
    slots = torch.arange(ROWS).flip(0).int()
    positions = torch.tensor(case.positions).int()
    return case.logits.to(dtype), (slots, positions, *sampler.parameters)


def shards(vocab: int, tp_size: int) -> Iterator[VocabShard]:
    for rank in range(tp_size):
        yield VocabShard(DetachedRank(rank, tp_size, DEVICE), vocab)


def tokens_of(shard: VocabShard) -> Tokens:
    return {"first_token": shard.start, "vocab_size": shard.vocab_size}


def on_device(columns: Columns) -> Iterator[torch.Tensor]:
    return (each.to(DEVICE) for each in columns)


@pytest.mark.parametrize(
    ("vocab", "tp_size", "dtype"),
    combine([7, 50, 2 * BLOCK + 5], [1, 2, 3, 4, 8], [torch.float32, torch.bfloat16]),
)
def test_largest_key_gives_the_token_of_the_whole_row(vocab: int, tp_size: int, dtype: torch.dtype) -> None:
    """Rows have ties across shards, NaN, infinities and masks; padding holds +inf or NaN, and never wins."""
    logits, columns = make_rows(vocab, dtype)
    slots, positions, seeds, params = on_device(columns)
    tables = torch.full((2, ROWS, int(positions.max()) + 1), -9, dtype=torch.int32, device=DEVICE)
    whole = logits.to(DEVICE)
    expected = sample_tokens.sample_tokens(whole, slots, positions, seeds, params, token_table=tables[0])
    keys = [
        sample_shard.find_best_keys(
            shard_logits(whole, shard), slots, positions, seeds, params, **tokens_of(shard)
        )
        for shard in shards(vocab, tp_size)
    ]
    best = torch.stack(keys).amax(0)
    assert sample_shard.take_tokens(best, slots, positions).tolist() == expected.tolist()
    found = sample_shard.take_tokens(best, slots, positions, tables[1])
    assert found.tolist() == expected.tolist() and NAN_LOGITS in expected.tolist()
    assert torch.equal(tables[0], tables[1])


@pytest.mark.parametrize("tp_size", [1, 3])
def test_keys_are_those_of_the_reference(tp_size: int) -> None:
    """To the bit where no noise is added: the noise of a GPU may differ in its last bits."""
    vocab = BLOCK + 77
    logits, columns = make_rows(vocab, torch.float32)
    slots, _, _, params = columns
    greedy = params[slots.long(), 0] == 0
    assert greedy.any() and not greedy.all()
    for shard in shards(vocab, tp_size):
        own = shard_logits(logits, shard)
        expected = sampling.find_best_keys(own, *columns, **tokens_of(shard))
        found = sample_shard.find_best_keys(own.to(DEVICE), *on_device(columns), **tokens_of(shard)).cpu()
        assert torch.equal(found[greedy], expected[greedy])
        assert torch.equal(found == NAN_KEY, expected == NAN_KEY)


def test_rows_at_any_stride() -> None:
    """The logits lie in a wider buffer, as a graph's do."""
    logits, columns = make_rows(300, torch.bfloat16)
    buffer = torch.full((ROWS, 170), torch.inf, dtype=torch.bfloat16, device=DEVICE)
    for shard in shards(300, 2):
        own = shard_logits(logits.to(DEVICE), shard)
        buffer[:, : shard.size] = own
        wide, narrow = (
            sample_shard.find_best_keys(each, *on_device(columns), **tokens_of(shard))
            for each in (buffer[:, : shard.size], own)
        )
        assert torch.equal(wide, narrow)


def test_no_rows() -> None:
    shard = next(shards(50, 2))
    nothing = torch.empty(0, dtype=torch.int32, device=DEVICE)
    _, (_, _, seeds, params) = make_rows(50, torch.float32)
    logits = torch.empty((0, 25), device=DEVICE)
    parameters = seeds.to(DEVICE), params.to(DEVICE)
    keys = sample_shard.find_best_keys(logits, nothing, nothing, *parameters, **tokens_of(shard))
    assert sample_shard.take_tokens(keys, nothing, nothing).tolist() == []
