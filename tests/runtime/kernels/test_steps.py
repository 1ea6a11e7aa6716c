"""The kernels around a step: inputs from tables, and the choice of tokens, against their references on any device."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from kernel_device import DEVICE

from skiff_runtime.kernels.inputs import prepare_decode_inputs, step_inputs, write_cells
from skiff_runtime.kernels.sampling import choose
from skiff_runtime.kernels.step_inputs import StepInputs, empty_step_inputs
from skiff_runtime.kernels.triton import step_inputs as fused_inputs
from skiff_runtime.kernels.triton.sampling import sample_tokens as fused_sampling

SLOTS, LENGTH = 7, 90
NAMES = ("token_ids", "positions", "slot_mapping", "contexts")


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=[1, 3, 16])
def tables(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Tokens, pages and page size; the last slot is nobody's."""
    rng = np.random.default_rng(request.param)
    tokens = rng.integers(0, 1000, (SLOTS, LENGTH), dtype=np.int32)
    pages = rng.integers(0, 500, (SLOTS, -(-LENGTH // request.param)), dtype=np.int32)
    return torch.from_numpy(tokens), torch.from_numpy(pages), request.param


def same(made: StepInputs, wanted: StepInputs) -> None:
    for name in NAMES:
        assert torch.equal(getattr(made, name).cpu().long(), getattr(wanted, name).long()), name


def test_inputs_of_mixed_rows(tables: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    tokens, pages, page_size = tables
    lengths = torch.tensor([1, 1, 33, 5, 2])
    offsets = lengths.cumsum(0) - lengths
    rows = torch.stack(
        (torch.tensor([2, 6, 0, 4, 5]), torch.tensor([80, 0, 7, 50, 15]), lengths, offsets)
    ).int()
    wanted_table, table = torch.zeros(5, pages.shape[1]).int(), torch.full((5, pages.shape[1]), -1).int()
    wanted = step_inputs(rows, tokens, pages, page_size, total=42, longest=33, block_table=wanted_table)
    made = empty_step_inputs(42, 5, DEVICE)
    for name in NAMES:
        getattr(made, name).fill_(-7)
    on_device = table.to(DEVICE)
    fused_inputs.fill_mixed_inputs(
        rows.to(DEVICE), 33, tokens.to(DEVICE), pages.to(DEVICE), page_size, made, on_device
    )
    same(made, wanted)
    for row, context in enumerate((rows[1] + rows[2]).tolist()):
        held = -(-context // page_size)
        assert torch.equal(on_device[row, :held].cpu(), wanted_table[row, :held])
        assert (on_device[row, held:] == -1).all()


def test_inputs_of_decode_rows(tables: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    tokens, pages, page_size = tables
    rows = torch.tensor([[3, 0, 6, 6], [41, 88, 0, 0]], dtype=torch.int32)
    wanted, made = empty_step_inputs(4, 4, torch.device("cpu")), empty_step_inputs(4, 4, DEVICE)
    prepare_decode_inputs(rows, tokens, pages, page_size, wanted, None)
    fused_inputs.prepare_decode_inputs(
        rows.to(DEVICE), tokens.to(DEVICE), pages.to(DEVICE), page_size, made, None
    )
    same(made, wanted)
    assert wanted.slot_mapping[2:].tolist() == [-1, -1]


def test_cells_and_pages(tables: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    _, pages, _ = tables
    count = 300
    cells = torch.stack(
        (torch.arange(count) % SLOTS, torch.arange(count) // SLOTS, torch.arange(count) + 5000)
    ).int()
    wide = torch.zeros(SLOTS, 64, dtype=torch.int32)
    written = wide.to(DEVICE, copy=True)
    write_cells(wide, cells)
    fused_inputs.write_cells(written, cells.to(DEVICE))
    assert torch.equal(written.cpu(), wide)
    indptr = torch.tensor([0, 2, 2 + pages.shape[1]], dtype=torch.int32)
    gathered = fused_inputs.gather_pages(
        pages.to(DEVICE), torch.tensor([5, 1]).to(DEVICE), indptr.to(DEVICE), total=int(indptr[-1])
    )
    assert torch.equal(gathered.cpu(), torch.cat((pages[5, :2], pages[1])))


@pytest.mark.parametrize("vocab", [50, 8193])
@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (40, 1.0), (0, 0.6), (30, 0.9)])
def test_choices_are_those_of_the_reference(vocab: int, top_k: int, top_p: float) -> None:
    """Greedy, with a seed at both ends of its range, hot, cold, with min_p; and rows of which much is masked."""
    generator = torch.Generator().manual_seed(vocab)
    filters = torch.tensor(
        [[0.0, 0, 1, 0], [1.0, 0, 1, 0], [0.3, 0, 1, 0], [1.7, 0, 1, 0.1], [1.0, 0, 1, 1.0], [0.0, 1, 1, 0.5]]
    )
    seeds = torch.tensor([3, -7, -(1 << 63), (1 << 63) - 1, 1 << 40, 0])
    slots = torch.tensor([5, 3, 1, 0, 2, 4, 3], dtype=torch.int32)
    positions = torch.tensor([0, 1, 2, 70, 88, 5, 9], dtype=torch.int32)
    logits = torch.randn(7, vocab, generator=generator) * 4
    logits[1, 5:] = -torch.inf
    logits[3] = logits[3].round()
    filters[1:5, 1], filters[1:5, 2] = top_k, top_p
    history = torch.zeros(6, LENGTH, dtype=torch.int32)
    wanted_history = history.clone()
    wanted = choose(logits, slots, positions, seeds, filters, wanted_history)
    written = history.to(DEVICE)
    chosen = fused_sampling.choose(
        logits.to(DEVICE),
        slots.to(DEVICE),
        positions.to(DEVICE),
        seeds.to(DEVICE),
        filters.to(DEVICE),
        written,
    )
    assert chosen.tolist() == wanted.tolist()
    assert torch.equal(written.cpu(), wanted_history)


def test_half_logits_and_rows_with_nothing_left() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[2] = -torch.inf
    zeros = torch.zeros(3, dtype=torch.int32)
    filters = torch.tensor([[0.9, 0, 1, 0]])
    seeds, positions = torch.tensor([11]), torch.arange(3, dtype=torch.int32)
    wanted = choose(logits.float(), zeros, positions, seeds, filters)
    made = fused_sampling.choose(*(each.to(DEVICE) for each in (logits, zeros, positions, seeds, filters)))
    assert made.tolist() == wanted.tolist()
    assert made[2] == 0


@triton.jit  # type: ignore[untyped-decorator]
def _store_noise(
    hashes: tl.tensor,
    noise: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
    FAST: tl.constexpr,  # noqa: N803
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(noise + place, fused_sampling._gumbel(tl.load(hashes + place).to(tl.uint32, bitcast=True), FAST))


def test_noise_of_every_hash() -> None:
    """Within what separates neighbours of a score of 60, whatever the 23 bits."""
    block, bits = 1 << (10 if DEVICE.type == "cuda" else 18), torch.arange(1 << 23)
    hashes = ((bits << 9) - ((bits >> 22) << 32)).int().to(DEVICE)
    noise = torch.full(bits.shape, torch.nan, device=DEVICE)
    _store_noise[(len(bits) // block,)](hashes, noise, BLOCK=block, FAST=DEVICE.type == "cuda")
    wanted = -torch.log2(-torch.log2((bits.double() + 0.5) / (1 << 23)))
    assert (noise.cpu().double() - wanted).abs().max() < 1e-5


def test_draws_have_the_distribution_of_the_logits() -> None:
    """A chi-square over positions of one seed."""
    count = 20_000 if DEVICE.type == "cuda" else 400
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0], device=DEVICE)
    slots, positions = (each.int().to(DEVICE) for each in (torch.zeros(count), torch.arange(count)))
    filters = torch.tensor([[0.8, 0, 1, 0]], device=DEVICE)
    seeds = torch.tensor([5], device=DEVICE)
    drawn = fused_sampling.choose(logits.expand(count, -1).contiguous(), slots, positions, seeds, filters)
    counts = drawn.cpu().long().bincount(minlength=5).double()
    expected = torch.softmax(logits.double().cpu() / 0.8, -1) * count
    assert ((counts - expected) ** 2 / expected).sum() < 4 + 5 * 8**0.5
