"""The sampling kernels against float64 and against their reference: in Triton's interpreter, or on a GPU."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_device import DEVICE
from numpy.typing import NDArray

from skiff_runtime.kernels.sampling import sample_tokens
from skiff_runtime.kernels.triton.sampling import sample_tokens as kernel
from skiff_runtime.step import NAN_LOGITS

REQUESTED = [(0.0, 0.0), (0.05, 0.0), (0.3, 0.2), (1.0, 0.0), (1.0, 0.02), (1.7, 0.5), (20.0, 0.0)]
"""Temperature and min_p of each slot."""
SEEDS = np.array([0, 3, -7, -(1 << 63), (1 << 63) - 1, 1 << 40, 11])
TABLE_LENGTH = 90

pytestmark = pytest.mark.usefixtures("poisoned")


def exact_noise(seeds: NDArray[np.int64], positions: NDArray[np.int64], vocab: int) -> NDArray[np.float64]:
    """Compute ``kernels.gumbel`` by its definition, in wrapping integers and float64: [rows, vocab]."""
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
@pytest.mark.parametrize("vocab, count", [(50, 140), (8193, 40)])
def test_no_token_has_a_better_score_than_the_sampled_one(vocab: int, count: int, dtype: torch.dtype) -> None:
    """The slack is what float32 rounds away: 4 units in the last place of a score, 1e-5 of its noise."""
    rng, rows = np.random.default_rng(vocab), count * (20 if DEVICE.type == "cuda" else 1)
    slots, positions = np.arange(rows) % len(REQUESTED), rng.integers(0, 100_000, rows)
    logits = torch.from_numpy(rng.standard_normal((rows, vocab)) * 2).to(dtype)
    logits[::5, rng.permutation(vocab)[: vocab // 2]] = -torch.inf
    params = torch.tensor([[temperature, 0, 1, min_p] for temperature, min_p in REQUESTED])
    columns = (torch.from_numpy(each).int() for each in (slots, positions))
    tables = torch.from_numpy(SEEDS), params
    on_device = (each.to(DEVICE) for each in (logits, *columns, *tables))
    sampled = kernel.sample_tokens(*on_device).cpu().long()[:, None]
    temperature, _, _, min_p = params.double()[slots].unbind(1)
    greedy = temperature == 0
    first_best = np.argmax(logits[greedy].float().numpy(), -1).tolist()
    assert sampled[greedy, 0].tolist() == first_best, "of equally good tokens, the lowest"
    scaled = logits.double() / temperature[:, None]
    scores = scaled + torch.from_numpy(exact_noise(SEEDS[slots], positions, vocab))
    thresholds = scaled.amax(-1, keepdim=True) + min_p.log()[:, None]
    sizes = scaled.masked_fill(scaled.isinf(), 0).abs().amax(-1, keepdim=True) + 20
    slack = 2 * (4 * torch.finfo(torch.float32).eps * sizes + 1e-5)
    best = scores.masked_fill(scaled < thresholds + slack * (thresholds > -torch.inf), -torch.inf)
    drawn = ~greedy
    assert (scaled.gather(1, sampled) >= thresholds - slack)[drawn].all(), "min_p drops these"
    assert (scores.gather(1, sampled) >= best.amax(-1, keepdim=True) - slack)[drawn].all()
    assert (sampled[:, 0] != best.argmax(-1))[drawn].sum() <= rows // 20, "rounding seldom decides"


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # NumPy, in Triton's interpreter, warns of NaN
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["all", "first", "last", "beside infinity"])
def test_row_with_nan_yields_no_token_and_a_valid_one_in_the_table(where: str, dtype: torch.dtype) -> None:
    """NaN stands in any block, at any temperature; the token table must stay an index of embeddings."""
    vocab, rows = 5000, len(REQUESTED)
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)).to(dtype)
    first, last = {"all": (0, vocab), "first": (0, 1), "last": (vocab - 1, vocab)}.get(where, (2100, 2101))
    logits[1::2, first:last] = torch.nan
    if where == "beside infinity":
        logits[1::2, 7] = torch.inf
    params = [[temperature, 3 * (row % 3), 0.9, min_p] for row, (temperature, min_p) in enumerate(REQUESTED)]
    slots, positions = torch.arange(rows).int(), torch.arange(rows).int() + 5
    table = torch.full((rows, 16), -9, dtype=torch.int32, device=DEVICE)
    by_slot = torch.from_numpy(SEEDS).to(DEVICE), torch.tensor(params).to(DEVICE)
    tokens = kernel.sample_tokens(
        logits.to(DEVICE), slots.to(DEVICE), positions.to(DEVICE), *by_slot, token_table=table
    ).cpu()
    assert (tokens[1::2] == NAN_LOGITS).all() and (tokens[::2] >= 0).all()
    assert torch.equal(table.cpu()[slots.long(), positions.long()], tokens.clamp(min=0))


@pytest.mark.parametrize("vocab", [50, 8193])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (40, 1.0), (0, 0.6), (30, 0.9)])
def test_sampled_tokens_equal_those_of_the_reference(vocab: int, top_k: int, top_p: float) -> None:
    """Rows are greedy, hot, cold, with min_p, extreme seeds, and many equal or masked logits."""
    generator = torch.Generator().manual_seed(vocab)
    params = torch.tensor(
        [[0.0, 0, 1, 0], [1.0, 0, 1, 0], [0.3, 0, 1, 0], [1.7, 0, 1, 0.1], [1.0, 0, 1, 1.0], [0.0, 1, 1, 0.5]]
    )
    seeds = torch.tensor([3, -7, -(1 << 63), (1 << 63) - 1, 1 << 40, 0])
    slots = torch.tensor([5, 3, 1, 0, 2, 4, 3], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 70, 88, 5, 9], dtype=torch.int32)
    logits = torch.randn(7, vocab, generator=generator) * 4
    logits[1, 5:] = -torch.inf
    logits[3] = logits[3].round()
    params[1:5, 1], params[1:5, 2] = top_k, top_p
    table = torch.zeros(6, TABLE_LENGTH, dtype=torch.int32)
    expected_table = table.clone()
    expected = sample_tokens(logits, slots, positions, seeds, params, expected_table)
    on_device = [each.to(DEVICE) for each in (logits, slots, positions, seeds, params, table)]
    assert kernel.sample_tokens(*on_device).tolist() == expected.tolist()
    assert torch.equal(on_device[-1].cpu(), expected_table)


def test_bfloat16_logits_and_rows_that_are_masked_whole() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[2] = -torch.inf
    zeros = torch.zeros(3, dtype=torch.int32)
    params = torch.tensor([[0.9, 0, 1, 0]])
    seeds, positions = torch.tensor([11]), torch.arange(3, dtype=torch.int32)
    expected = sample_tokens(logits.float(), zeros, positions, seeds, params)
    tokens = kernel.sample_tokens(*(each.to(DEVICE) for each in (logits, zeros, positions, seeds, params)))
    assert tokens.tolist() == expected.tolist()
    assert tokens[2] == 0


@triton.jit  # type: ignore[untyped-decorator]
def store_noise_kernel(
    hashes: tl.tensor,
    noise: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
    FAST: tl.constexpr,  # noqa: N803
) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(noise + at, kernel._gumbel(tl.load(hashes + at).to(tl.uint32, bitcast=True), FAST))


def test_noise_of_every_hash_is_within_1e_5() -> None:
    """All 23 bits that count are tried; 1e-5 is what separates neighbouring float32 numbers near a score of 60."""
    block, bits = 1 << (10 if DEVICE.type == "cuda" else 18), torch.arange(1 << 23)
    hashes = ((bits << 9) - ((bits >> 22) << 32)).int().to(DEVICE)
    noise = torch.full(bits.shape, torch.nan, device=DEVICE)
    store_noise_kernel[(len(bits) // block,)](hashes, noise, BLOCK=block, FAST=DEVICE.type == "cuda")
    expected = -torch.log2(-torch.log2((bits.double() + 0.5) / (1 << 23)))
    assert (noise.cpu().double() - expected).abs().max() < 1e-5
