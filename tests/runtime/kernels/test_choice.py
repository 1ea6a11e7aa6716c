"""The choice of tokens against float64: no other token of its row has a better score than the one that is taken."""

from typing import Any

import numpy as np
import pytest
import torch
from kernel_device import DEVICE
from numpy.typing import NDArray

from skiff_runtime.kernels.triton.sampling.sample_tokens import choose
from skiff_runtime.step import NAN_LOGITS

ASKED = [(0.0, 0.0), (0.05, 0.0), (0.3, 0.2), (1.0, 0.0), (1.0, 0.02), (1.7, 0.5), (20.0, 0.0)]
"""Temperature and min_p of each slot."""
SEEDS = np.array([0, 3, -7, -(1 << 63), (1 << 63) - 1, 1 << 40, 11])


pytestmark = pytest.mark.usefixtures("poisoned")


def exact_noise(seeds: NDArray[np.int64], positions: NDArray[np.int64], vocab: int) -> NDArray[np.float64]:
    """``kernels.gumbel`` by its definition, in whole numbers that wrap, and float64: [rows, vocab]."""
    places = positions.astype(np.uint64)
    first = mix64(seeds.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + places)
    second = mix64(first + places)
    tokens = np.arange(vocab, dtype=np.uint32) * np.uint32(0x9E3779B1)
    mixed: NDArray[Any] = tokens ^ first.astype(np.uint32)[:, None]
    mixed = (mixed ^ mixed >> 16) * np.uint32(0x85EBCA6B) + second.astype(np.uint32)[:, None]
    mixed = (mixed ^ mixed >> 13) * np.uint32(0xC2B2AE35)
    uniform = (((mixed ^ mixed >> 16) >> 9) + 0.5) / 2.0**23
    noise: NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        values = (values ^ values >> np.uint64(31)) * np.uint64(factor)
    return values ^ values >> np.uint64(31)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab, count", [(50, 300), (8193, 40)])
def test_no_token_has_a_better_score_than_the_chosen_one(vocab: int, count: int, dtype: torch.dtype) -> None:
    """But for what float32 rounds away: of a score 4 steps of its last bit, of its noise 1e-5, and of two of them twice."""
    rng, rows = np.random.default_rng(vocab), count * (20 if DEVICE.type == "cuda" else 1)
    slots, positions = np.arange(rows) % len(ASKED), rng.integers(0, 100_000, rows)
    logits = torch.from_numpy(rng.standard_normal((rows, vocab)) * 2).to(dtype)
    logits[::5, rng.permutation(vocab)[: vocab // 2]] = -torch.inf
    filters = torch.tensor([[temperature, 0, 1, min_p] for temperature, min_p in ASKED])
    columns = (torch.from_numpy(each).int() for each in (slots, positions))
    tables = torch.from_numpy(SEEDS), filters
    given = (each.to(DEVICE) for each in (logits, *columns, *tables))
    chosen = choose(*given).cpu().long()[:, None]
    temperature, _, _, min_p = filters.double()[slots].unbind(1)
    greedy = temperature == 0
    assert chosen[greedy, 0].tolist() == np.argmax(logits[greedy].float().numpy(), -1).tolist(), "the first"
    scaled = logits.double() / temperature[:, None]
    scores = scaled + torch.from_numpy(exact_noise(SEEDS[slots], positions, vocab))
    floors = scaled.amax(-1, keepdim=True) + min_p.log()[:, None]
    sizes = scaled.masked_fill(scaled.isinf(), 0).abs().amax(-1, keepdim=True) + 20
    slack = 2 * (4 * torch.finfo(torch.float32).eps * sizes + 1e-5)
    best = scores.masked_fill(scaled < floors + slack * (floors > -torch.inf), -torch.inf)
    drawn = ~greedy
    assert (scaled.gather(1, chosen) >= floors - slack)[drawn].all(), "what min_p leaves out"
    assert (scores.gather(1, chosen) >= best.amax(-1, keepdim=True) - slack)[drawn].all()
    assert (chosen[:, 0] != best.argmax(-1))[drawn].sum() <= rows // 20, "rounding seldom decides"


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # NumPy, in Triton's interpreter, warns of NaN
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["all", "first", "last", "beside infinity"])
def test_a_row_with_nan_yields_no_token_and_leaves_one_that_can_be_read(
    where: str, dtype: torch.dtype
) -> None:
    """In any part of the row, at any temperature and filter; the table of tokens must stay an index of embeddings."""
    vocab, rows = 5000, len(ASKED)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)).to(dtype)
    first, last = {"all": (0, vocab), "first": (0, 1), "last": (vocab - 1, vocab)}.get(where, (2100, 2101))
    logits[1::2, first:last] = torch.nan
    if where == "beside infinity":
        logits[1::2, 7] = torch.inf
    filters = [[temperature, 3 * (row % 3), 0.9, min_p] for row, (temperature, min_p) in enumerate(ASKED)]
    slots, positions = torch.arange(rows).int(), torch.arange(rows).int() + 5
    history = torch.full((rows, 16), -9, dtype=torch.int32, device=DEVICE)
    seeds, wanted = torch.from_numpy(SEEDS).to(DEVICE), torch.tensor(filters).to(DEVICE)
    tokens = choose(
        logits.to(DEVICE), slots.to(DEVICE), positions.to(DEVICE), seeds, wanted, history=history
    ).cpu()
    assert (tokens[1::2] == NAN_LOGITS).all() and (tokens[::2] >= 0).all()
    assert torch.equal(history.cpu()[slots.long(), positions.long()], tokens.clamp(min=0))
