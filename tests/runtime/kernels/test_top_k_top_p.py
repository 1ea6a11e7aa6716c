"""The top-k and top-p thresholds against the definition: in Triton's interpreter, or on a GPU."""

from dataclasses import replace

import pytest
import torch
from kernel_device import DEVICE
from numpy.random import default_rng

from skiff_runtime.kernels.triton.sampling.top_k_top_p import find_thresholds
from skiff_runtime.kernels.tuning import overridden, tuning_for

pytestmark = pytest.mark.usefixtures("poisoned")

REQUESTED = [
    (1.0, 0, 0.9),
    (0.6, 20, 0.95),
    (0.7, 2000, 1.0),
    (2.0, 50, 0.5),
    (1.0, 1, 0.99),
    (0.05, 0, 0.999),
    (1.0, 7, 0.01),
    (1.0, 0, 0.01),
]
"""Temperature, top_k, top_p."""
TUNING = tuning_for(DEVICE)
CHUNK = TUNING.top_k_top_p.chunk
VOCAB = CHUNK + TUNING.top_k_top_p.max_candidates + 300
SLACK = 1e-5
"""The part of the weight that rounding may add or take: sums are rounded in another order each."""


def make_params(requested: list[tuple[float, int, float]]) -> torch.Tensor:
    return torch.tensor([[*each, 0.0] for each in requested], dtype=torch.float32)


def count_kept(scaled: torch.Tensor, top_k: int, top_p: float) -> int:
    """Return how many tokens of one row top_k, then top_p, keep, ties among them."""
    ranked = scaled.double().sort(descending=True).values
    left = ranked[: top_k or len(ranked)]
    if top_p >= 1:
        return int((ranked >= left[-1]).sum())
    mass = (left - left[0]).exp().cumsum(0)
    count = int((torch.cat((mass.new_zeros(1), mass[:-1])) < top_p * mass[-1]).sum())
    return int((ranked >= left[min(max(count, 1), len(left)) - 1]).sum())


def keeps_what_the_definition_keeps(scaled: torch.Tensor, threshold: float, top_k: int, top_p: float) -> bool:
    found = int((scaled >= threshold).sum())
    return (
        count_kept(scaled, top_k, top_p - SLACK) <= found <= count_kept(scaled, top_k, min(top_p + SLACK, 1))
    )


@pytest.mark.parametrize(
    "vocab, spread, dtype",
    [
        (40, 3.0, torch.float32),
        (VOCAB, 0.1, torch.bfloat16),
        (VOCAB, 0.1, torch.float32),
        (VOCAB, 3.0, torch.float16),
        (VOCAB, 3.0, torch.float32),
        (VOCAB, 12.0, torch.bfloat16),
        (VOCAB, 12.0, torch.float16),
    ],
    ids=str,
)
def test_thresholds_keep_what_the_definition_keeps(vocab: int, spread: float, dtype: torch.dtype) -> None:
    """Rows are flat, so that too many candidates are left to be gathered, usual, or hardly have a second token."""
    numbers = default_rng(vocab).standard_normal((len(REQUESTED), vocab)) * spread
    logits = torch.from_numpy(numbers).to(dtype)
    logits[:, :3] = -torch.inf
    params, slots = make_params(REQUESTED), torch.arange(len(REQUESTED), dtype=torch.int32)
    thresholds = find_thresholds(logits.to(DEVICE), slots.to(DEVICE), params.to(DEVICE))[0].cpu()
    scaled = logits.float() / params[:, :1]
    for row, (_, top_k, top_p) in enumerate(REQUESTED):
        assert keeps_what_the_definition_keeps(scaled[row], float(thresholds[row]), top_k, top_p)
        assert (scaled[row] == thresholds[row]).any(), "the threshold is one of the logits"


def test_result_is_the_same_whatever_the_number_of_programs() -> None:
    """Five chunks are taken by a program each, by two programs, and by one."""
    vocab = 4 * CHUNK + 70
    numbers = default_rng(1).standard_normal((3, vocab)) * 4
    logits = torch.from_numpy(numbers).bfloat16().to(DEVICE)
    slots, params = torch.arange(3, dtype=torch.int32, device=DEVICE), make_params(REQUESTED[:3]).to(DEVICE)
    found = []
    for programs in (1024, 6, 3):
        own = replace(TUNING.top_k_top_p, max_programs=programs, min_programs_of_row=1)
        with overridden(replace(TUNING, top_k_top_p=own)):
            thresholds, maxima = find_thresholds(logits, slots, params)
        found.append((thresholds.tolist(), maxima.tolist()))
    assert found[0] == found[1] == found[2]
    assert found[0][1] == [[float(chunk.max()) for chunk in row.split(CHUNK)] for row in logits.float()]
    for row, (temperature, top_k, top_p) in enumerate(REQUESTED[:3]):
        scaled = logits[row].float().cpu() / temperature
        assert keeps_what_the_definition_keeps(scaled, found[0][0][row], top_k, top_p)


def test_rows_that_drop_nothing_have_no_threshold() -> None:
    """Greedy rows are not searched, nor those whose top_k and top_p keep every token."""
    requested = [(0.0, 5, 0.5), (1.0, 0, 1.0), (1.0, 64, 1.0), (1.0, 1 << 24, 1.0), (1.0, 63, 1.0)]
    logits = torch.arange(64.0).expand(5, -1).contiguous()
    slots = torch.tensor([4, 3, 2, 1, 0], dtype=torch.int32)
    params = make_params(requested[::-1])
    thresholds, _ = find_thresholds(logits.to(DEVICE), slots.to(DEVICE), params.to(DEVICE))
    assert thresholds.tolist() == [-torch.inf] * 4 + [1.0]


def test_ties_are_kept_among_logits_of_any_size() -> None:
    """Keys must be in order from minus infinity to plus zero."""
    row = torch.tensor([-0.0, 0.0, -1e-30, -1e30, -2.0, -2.0, -2.0, -3e38])
    requested = [(1.0, count, 1.0) for count in range(1, 8)]
    thresholds, _ = find_thresholds(
        row.expand(7, -1).contiguous().to(DEVICE),
        torch.arange(7, dtype=torch.int32, device=DEVICE),
        make_params(requested).to(DEVICE),
    )
    kept = [int((row >= threshold).sum()) for threshold in thresholds.cpu()]
    assert kept == [2, 2, 3, 6, 6, 6, 7]
