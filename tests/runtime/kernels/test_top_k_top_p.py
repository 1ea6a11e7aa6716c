"""What top_k and top_p keep, found by keys, against the definition: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from kernel_device import DEVICE
from numpy.random import default_rng

from skiff_runtime.kernels.triton.sampling import top_k_top_p as fused
from skiff_runtime.kernels.triton.sampling.top_k_top_p import PART, ROOM, find_thresholds

pytestmark = pytest.mark.usefixtures("poisoned")

ASKED = [
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
VOCAB = PART + ROOM + 300
SLACK = 1e-5
"""Of the weight that top_p is compared with: sums are rounded, in another order each."""


def filters_of(asked: list[tuple[float, int, float]]) -> torch.Tensor:
    return torch.tensor([[*each, 0.0] for each in asked], dtype=torch.float32)


def kept(scaled: torch.Tensor, top_k: int, top_p: float) -> int:
    """How many tokens top_k, then top_p, keep of one row, ties among them."""
    ranked = scaled.double().sort(descending=True).values
    left = ranked[: top_k or len(ranked)]
    if top_p >= 1:
        return int((ranked >= left[-1]).sum())
    mass = (left - left[0]).exp().cumsum(0)
    wanted = int((torch.cat((mass.new_zeros(1), mass[:-1])) < top_p * mass[-1]).sum())
    return int((ranked >= left[min(max(wanted, 1), len(left)) - 1]).sum())


def keeps_enough(scaled: torch.Tensor, floor: float, top_k: int, top_p: float) -> bool:
    """Whether as many of one row are not below the floor as top_k, then top_p, keep."""
    found = int((scaled >= floor).sum())
    return kept(scaled, top_k, top_p - SLACK) <= found <= kept(scaled, top_k, min(top_p + SLACK, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [40, VOCAB])
@pytest.mark.parametrize("spread", [0.1, 3.0, 12.0])
def test_floors_keep_what_the_definition_keeps(vocab: int, spread: float, dtype: torch.dtype) -> None:
    """Flat rows, of which too much is left to be put together; usual ones; and such as have hardly a second token."""
    numbers = default_rng(vocab).standard_normal((len(ASKED), vocab)) * spread
    logits = torch.from_numpy(numbers).to(dtype)
    logits[:, :3] = -torch.inf
    filters, slots = filters_of(ASKED), torch.arange(len(ASKED), dtype=torch.int32)
    floors = find_thresholds(logits.to(DEVICE), slots.to(DEVICE), filters.to(DEVICE))[0].cpu()
    scaled = logits.float() / filters[:, :1]
    for row, (_, top_k, top_p) in enumerate(ASKED):
        assert keeps_enough(scaled[row], float(floors[row]), top_k, top_p)
        assert (scaled[row] == floors[row]).any(), "the least of what is kept is among the logits"


def test_a_row_is_the_same_by_whatever_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five parts, by a program each, by two programs and by one."""
    vocab = 4 * PART + 70
    numbers = default_rng(1).standard_normal((3, vocab)) * 4
    logits = torch.from_numpy(numbers).bfloat16().to(DEVICE)
    slots, filters = torch.arange(3, dtype=torch.int32, device=DEVICE), filters_of(ASKED[:3]).to(DEVICE)
    found = []
    for programs in (1024, 6, 3):
        monkeypatch.setattr(fused, "PROGRAMS", programs)
        monkeypatch.setattr(fused, "LEAST_PROGRAMS", 1)
        floors, maxima = find_thresholds(logits, slots, filters)
        found.append((floors.tolist(), maxima.tolist()))
    assert found[0] == found[1] == found[2]
    assert found[0][1] == [[float(part.max()) for part in row.split(PART)] for row in logits.float()]
    for row, (temperature, top_k, top_p) in enumerate(ASKED[:3]):
        assert keeps_enough(logits[row].float().cpu() / temperature, found[0][0][row], top_k, top_p)


def test_only_who_asks_has_a_floor() -> None:
    """Greedy rows, and those whose top_k or top_p leaves nothing out, are not searched."""
    asked = [(0.0, 5, 0.5), (1.0, 0, 1.0), (1.0, 64, 1.0), (1.0, 1 << 24, 1.0), (1.0, 63, 1.0)]
    logits = torch.arange(64.0).expand(5, -1).contiguous()
    slots = torch.tensor([4, 3, 2, 1, 0], dtype=torch.int32)
    floors, _ = find_thresholds(logits.to(DEVICE), slots.to(DEVICE), filters_of(asked[::-1]).to(DEVICE))
    assert floors.tolist() == [-torch.inf] * 4 + [1.0]


def test_ties_and_negative_logits_of_any_size() -> None:
    """All that is as large as the last one stays; keys are in order from minus infinity to plus zero."""
    row = torch.tensor([-0.0, 0.0, -1e-30, -1e30, -2.0, -2.0, -2.0, -3e38])
    asked = [(1.0, count, 1.0) for count in range(1, 8)]
    floors, _ = find_thresholds(
        row.expand(7, -1).contiguous().to(DEVICE),
        torch.arange(7, dtype=torch.int32, device=DEVICE),
        filters_of(asked).to(DEVICE),
    )
    assert [int((row >= floor).sum()) for floor in floors.cpu()] == [2, 2, 3, 6, 6, 6, 7]
