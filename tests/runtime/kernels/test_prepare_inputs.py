"""The step-input kernels against their references: in Triton's interpreter, or on a GPU."""

import numpy as np
import pytest
import torch
from kernel_device import DEVICE

from skiff_runtime.kernels.prepare_inputs import prepare_decode_inputs, prepare_inputs, write_cells
from skiff_runtime.kernels.step_inputs import StepInputs, empty_step_inputs
from skiff_runtime.kernels.triton import prepare_inputs as kernel

SLOTS, LENGTH = 7, 90
FIELDS = ("token_ids", "positions", "slot_mapping", "seq_lens")

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(params=[1, 3, 16])
def tables(request: pytest.FixtureRequest) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return a token table, a page table and a page size; the last slot is the padding slot."""
    rng = np.random.default_rng(request.param)
    tokens = rng.integers(0, 1000, (SLOTS, LENGTH), dtype=np.int32)
    pages = rng.integers(0, 500, (SLOTS, -(-LENGTH // request.param)), dtype=np.int32)
    return torch.from_numpy(tokens), torch.from_numpy(pages), request.param


def assert_equal(inputs: StepInputs, expected: StepInputs) -> None:
    for field in FIELDS:
        assert torch.equal(getattr(inputs, field).cpu().long(), getattr(expected, field).long()), field


def test_inputs_of_mixed_rows_equal_the_reference(tables: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    tokens, pages, page_size = tables
    lengths = torch.tensor([1, 1, 33, 5, 2])
    offsets = lengths.cumsum(0) - lengths
    rows = torch.stack(
        (torch.tensor([2, 6, 0, 4, 5]), torch.tensor([80, 0, 7, 50, 15]), lengths, offsets)
    ).int()
    expected_table = torch.zeros(5, pages.shape[1]).int()
    expected = prepare_inputs(
        rows, tokens, pages, page_size, total=42, max_len=33, block_table=expected_table
    )
    inputs = empty_step_inputs(42, 5, DEVICE)
    for field in FIELDS:
        getattr(inputs, field).fill_(-7)
    block_table = torch.full((5, pages.shape[1]), -1).int().to(DEVICE)
    on_device = tokens.to(DEVICE), pages.to(DEVICE)
    kernel.fill_mixed_inputs(rows.to(DEVICE), 33, *on_device, page_size, inputs, block_table)
    assert_equal(inputs, expected)
    for row, seq_len in enumerate((rows[1] + rows[2]).tolist()):
        used = -(-seq_len // page_size)
        assert torch.equal(block_table[row, :used].cpu(), expected_table[row, :used])
        assert (block_table[row, used:] == -1).all()


def test_inputs_of_decode_rows_equal_the_reference(tables: tuple[torch.Tensor, torch.Tensor, int]) -> None:
    tokens, pages, page_size = tables
    rows = torch.tensor([[3, 0, 6, 6], [41, 88, 0, 0]], dtype=torch.int32)
    expected, inputs = empty_step_inputs(4, 4, torch.device("cpu")), empty_step_inputs(4, 4, DEVICE)
    prepare_decode_inputs(rows, tokens, pages, page_size, expected, None)
    kernel.fill_decode_inputs(rows.to(DEVICE), tokens.to(DEVICE), pages.to(DEVICE), page_size, inputs, None)
    assert_equal(inputs, expected)
    assert expected.slot_mapping[2:].tolist() == [-1, -1], "rows of the padding slot are stored nowhere"


def test_written_cells_and_gathered_pages_equal_the_tables(
    tables: tuple[torch.Tensor, torch.Tensor, int],
) -> None:
    _, pages, _ = tables
    count = 300
    cells = torch.stack(
        (torch.arange(count) % SLOTS, torch.arange(count) // SLOTS, torch.arange(count) + 5000)
    ).int()
    expected = torch.zeros(SLOTS, 64, dtype=torch.int32)
    written = expected.to(DEVICE, copy=True)
    write_cells(expected, cells)
    kernel.write_cells(written, cells.to(DEVICE))
    assert torch.equal(written.cpu(), expected)
    indptr = torch.tensor([0, 2, 2 + pages.shape[1]], dtype=torch.int32)
    gathered = kernel.gather_pages(
        pages.to(DEVICE), torch.tensor([5, 1]).to(DEVICE), indptr.to(DEVICE), total=int(indptr[-1])
    )
    assert torch.equal(gathered.cpu(), torch.cat((pages[5, :2], pages[1])))
