"""The sampler: distributions, the meaning of its filters, and independence of the rest of the batch."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from engine_driver import DEVICE
from hypothesis import given, settings
from hypothesis import strategies as st

from skiff_runtime.engine.input_batch import SampledRows
from skiff_runtime.engine.sampler import Sampler
from skiff_runtime.kernels.gumbel import add_gumbel
from skiff_runtime.kernels.top_k_top_p import MAX_PARTIAL_TOP_K
from skiff_runtime.messages import SamplingSpec
from skiff_runtime.step import NAN_LOGITS, SlotOpened

OWN_DEVICE = torch.device(DEVICE)


def params(**changes: Any) -> SamplingSpec:
    return SamplingSpec(**{"max_tokens": 1, "seed": 0, **changes})


def draw(logits: torch.Tensor, samplings: list[SamplingSpec], positions: list[int]) -> list[int]:
    """Sample one token per row, each row in a slot of its own."""
    sampler = Sampler(len(samplings), OWN_DEVICE)
    nothing = np.zeros(0, dtype=np.int32)
    sampler.open([SlotOpened(slot, nothing, sampling, 0) for slot, sampling in enumerate(samplings)])
    result: list[int] = sampler.sample(
        logits.to(OWN_DEVICE, copy=True), rows_at(range(len(samplings)), positions)
    ).tolist()
    return result


def rows_at(slots: Sequence[int], positions: Sequence[int]) -> SampledRows:
    """Return rows in these slots that sample at these positions."""
    columns = np.array([slots, positions], dtype=np.int32)
    return SampledRows(*torch.from_numpy(columns).long().to(OWN_DEVICE), *columns)


def frequencies(logits: torch.Tensor, sampling: SamplingSpec, count: int) -> np.ndarray[Any, Any]:
    """Count how often each token is sampled at ``count`` positions."""
    tokens = draw(logits.expand(count, -1), [sampling] * count, list(range(count)))
    return np.bincount(tokens, minlength=logits.shape[-1])


def filtered(logits: torch.Tensor, sampling: SamplingSpec) -> torch.Tensor:
    """Compute the distribution of one row by definition: temperature, top_k, top_p, min_p."""
    probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
    order = probabilities.argsort(descending=True)
    ranked = probabilities[order]
    if sampling.top_k:
        ranked[sampling.top_k :] = 0
    ranked = ranked / ranked.sum()
    ranked[(ranked.cumsum(0) - ranked) >= sampling.top_p] = 0
    ranked[ranked < sampling.min_p * ranked[0]] = 0
    result = torch.zeros_like(probabilities)
    result[order] = ranked / ranked.sum()
    return result


def assert_distribution(counts: np.ndarray[Any, Any], probabilities: torch.Tensor) -> None:
    """Check that no filtered token is sampled, and that a chi-square over the likely ones is within a wide bound."""
    expected = probabilities.numpy() * counts.sum()
    assert (counts[expected == 0] == 0).all()
    likely = expected >= 5
    statistic = ((counts[likely] - expected[likely]) ** 2 / expected[likely]).sum()
    freedom = max(int(likely.sum()) - 1, 1)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "seed": 1 << 63},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"top_k": 12, "top_p": 0.6, "min_p": 0.05, "temperature": 1.3},
        {"top_k": 1 << 20, "seed": -7},
    ],
    ids=str,
)
def test_sampled_distribution_equals_its_definition(changes: dict[str, Any]) -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 1.5
    sampling = params(**changes)
    assert_distribution(frequencies(logits, sampling, 8000), filtered(logits, sampling))


def test_seeds_are_independent() -> None:
    logits = torch.randn(30, generator=torch.Generator().manual_seed(2))
    samplings = [params(seed=seed) for seed in range(8000)]
    tokens = draw(logits.expand(8000, -1), samplings, [3] * 8000)
    assert_distribution(np.bincount(tokens, minlength=30), torch.softmax(logits.double(), -1))


def test_neighbouring_positions_are_independent() -> None:
    logits = torch.zeros(4)
    tokens = np.array(draw(logits.expand(8000, -1), [params(seed=5)] * 8000, list(range(8000))))
    pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
    assert_distribution(pairs, torch.full((16,), 1 / 16, dtype=torch.float64))


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 2, 7, 50, MAX_PARTIAL_TOP_K + 1]),
    top_p=st.floats(0.01, 1.0),
    min_p=st.floats(0.0, 0.9),
    temperature=st.floats(0.1, 3.0),
)
def test_only_tokens_that_pass_the_filters_are_sampled(
    seed: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(seed)) * 2
    sampling = params(seed=seed, top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    allowed = filtered(
        logits, params(top_k=top_k, top_p=top_p + 1e-5, min_p=min_p - 1e-5, temperature=temperature)
    )
    assert all(allowed[token] > 0 for token in draw(logits.expand(20, -1), [sampling] * 20, list(range(20))))


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(7)), size=st.integers(1, 7), seed=st.integers(0, 99))
def test_row_does_not_depend_on_its_batch(order: list[int], size: int, seed: int) -> None:
    kinds = [
        params(temperature=0.0),
        params(seed=3),
        params(seed=4, top_k=4),
        params(seed=5, top_k=300),
        params(seed=6, top_p=0.8),
        params(seed=7, min_p=0.1),
        params(seed=8, top_k=MAX_PARTIAL_TOP_K + 5, top_p=0.9, temperature=0.7),
    ]
    logits = torch.randn(7, 2000, generator=torch.Generator().manual_seed(seed))
    alone = [draw(logits[row : row + 1], [kinds[row]], [row + 10])[0] for row in range(7)]
    rows = order[:size]
    together = draw(logits[rows], [kinds[row] for row in rows], [row + 10 for row in rows])
    assert together == [alone[row] for row in rows]


def test_greedy_takes_the_maximum() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(0))
    samplings = [params(temperature=0.0)] * 4 + [params(top_k=1, seed=9)]
    samplings += [params(temperature=1e-30), params(top_p=0.0), params(min_p=1.0, top_k=1 << 40)]
    logits = logits[[0, 1, 2, 3, 4, 0, 1, 2]]
    assert draw(logits, samplings, [0] * 8) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("where", ["all", "one", "some"])
def test_row_with_nan_yields_no_token(where: str) -> None:
    """This holds for every kind of row; rows without NaN beside it keep their tokens."""
    kinds = [
        params(temperature=0.0),
        params(seed=3),
        params(seed=4, top_k=4),
        params(seed=6, top_p=0.8),
        params(seed=7, min_p=0.1),
        params(seed=8, top_k=MAX_PARTIAL_TOP_K + 5, top_p=0.9, temperature=0.7),
    ]
    generator = torch.Generator().manual_seed(5)
    whole = torch.randn(len(kinds), 5000, generator=generator)
    expected = draw(whole, kinds, [10] * len(kinds))
    broken = whole.clone()
    counts = {"all": 5000, "one": 1, "some": 999}
    broken[:, torch.randperm(5000, generator=generator)[: counts[where]]] = torch.nan
    assert draw(broken, kinds, [10] * len(kinds)) == [NAN_LOGITS] * len(kinds)
    for row in range(len(kinds)):
        mixed = whole.clone()
        mixed[row] = broken[row]
        tokens = draw(mixed, kinds, [10] * len(kinds))
        assert tokens == [*expected[:row], NAN_LOGITS, *expected[row + 1 :]]


def test_reopened_slot_has_its_new_parameters() -> None:
    sampler = Sampler(2, OWN_DEVICE)
    nothing = np.zeros(0, dtype=np.int32)
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(0)).to(OWN_DEVICE)
    rows = rows_at([1], [4])
    sampler.open([SlotOpened(1, nothing, params(top_k=3, seed=1), 0)])
    sampler.open([SlotOpened(1, nothing, params(seed=2, temperature=5.0), 0)])
    token = int(sampler.sample(logits.clone(), rows))
    assert [token] == draw(logits, [params(seed=2, temperature=5.0)], [4])
    sampler.open([SlotOpened(1, nothing, params(temperature=0.0), 0)])
    assert int(sampler.sample(logits.clone(), rows)) == int(logits.argmax())


def test_noise_is_finite_and_standard_gumbel() -> None:
    noise = add_gumbel(torch.zeros(64, 50_000), torch.arange(64), torch.arange(64))
    assert torch.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.5772) < 0.005
    assert abs(float(noise.var()) - np.pi**2 / 6) < 0.01


def test_noise_is_the_same_on_every_device() -> None:
    """It equals the definition in Python integers: a seed that a user noted must keep generating the same text."""
    seeds, positions = [0, -7, -(1 << 63), (1 << 63) - 1], [0, 17, 3, 100_000]
    noise = add_gumbel(torch.zeros(4, 50), torch.tensor(seeds), torch.tensor(positions))
    naive = [[naive_gumbel(*row, token) for token in range(50)] for row in zip(seeds, positions, strict=True)]
    assert torch.allclose(noise, torch.tensor(naive), atol=1e-4)


def naive_gumbel(seed: int, position: int, token: int) -> float:
    """Compute the noise by definition, with unsigned integers of 64 and 32 bits."""
    first = mix64((seed * 0x9E3779B97F4A7C15 + position) % 2**64)
    second = mix64((first + position) % 2**64)
    mixed = (token * 0x9E3779B1 % 2**32) ^ (first % 2**32)
    mixed = ((mixed ^ mixed >> 16) * 0x85EBCA6B + second) % 2**32
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 % 2**32
    bits = (mixed ^ mixed >> 16) >> 9
    return -math.log(-math.log((bits + 0.5) / 2**23))


def mix64(value: int) -> int:
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        value = (value ^ value >> 31) * factor % 2**64
    return value ^ value >> 31
