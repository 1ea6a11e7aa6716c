"""A step's inputs from the device's own tables."""

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.step_inputs import StepInputs
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

BLOCK = 256


@triton.jit(do_not_specialize=["count"])
def _write_cells(
    table: tl.tensor,
    cells: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = tl.load(cells + index, inside, 0).to(tl.int64)
    column = tl.load(cells + count + index, inside, 0)
    value = tl.load(cells + 2 * count + index, inside, 0)
    tl.store(table + row * stride + column, value.to(table.dtype.element_ty), inside)


def write_cells(table: torch.Tensor, cells: torch.Tensor) -> None:
    """Set cells of an int32 table: ``cells`` int32[3, N] are rows, columns and values; no cell may be named twice."""
    count = cells.shape[1]
    _write_cells[(triton.cdiv(count, BLOCK),)](table, cells, table.stride(0), count, BLOCK=BLOCK, num_warps=4)


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "lengths", "offsets"])
def prepare_inputs_kernel(
    slots: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    offsets: tl.tensor,
    tokens: tl.tensor,
    pages: tl.tensor,
    token_ids: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    contexts: tl.tensor,
    block_table: tl.tensor,
    tokens_stride: tl.tensor,
    pages_stride: tl.tensor,
    block_table_stride: tl.tensor,
    nobody: tl.tensor,
    PAGE: tl.constexpr,
    DECODE: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(starts + row)
    if DECODE:
        index = tl.arange(0, 1)
        length = 1
        offset = row
    else:
        index = part * BLOCK + tl.arange(0, BLOCK)
        length = tl.load(lengths + row)
        offset = tl.load(offsets + row)
    inside = index < length
    position = start + index
    token = tl.load(tokens + slot * tokens_stride + position, inside, 0)
    page = tl.load(pages + slot * pages_stride + position // PAGE, inside, 0)
    location = tl.where(slot == nobody, -1, page.to(tl.int64) * PAGE + position % PAGE)
    tl.store(token_ids + offset + index, token, inside)
    tl.store(positions + offset + index, position, inside)
    tl.store(slot_mapping + offset + index, location, inside)
    if part == 0:
        tl.store(contexts + row, start + length)
        if COPY:
            held = tl.cdiv(start + length, PAGE)
            for first in range(0, held, BLOCK):
                column = first + tl.arange(0, BLOCK)
                source = pages + slot * pages_stride + column
                target = block_table + row.to(tl.int64) * block_table_stride + column
                tl.store(target, tl.load(source, column < held, 0), column < held)


def prepare_decode_inputs(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    made: StepInputs,
    block_table: torch.Tensor | None,
) -> None:
    """As ``fill_mixed_inputs``, for rows of one token each: ``rows`` int32[2, R] are slots and starts."""
    slots, starts = rows.unbind()
    _launch(slots, starts, starts, starts, 1, tokens, pages, page_size, made, block_table, decode=True)


def fill_mixed_inputs(
    rows: torch.Tensor,
    longest: int,
    tokens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    made: StepInputs,
    block_table: torch.Tensor | None,
) -> None:
    """Fill ``made`` as ``kernels.inputs.step_inputs`` does."""
    slots, starts, lengths, offsets = rows.unbind()
    _launch(
        slots, starts, lengths, offsets, longest, tokens, pages, page_size, made, block_table, decode=False
    )


def _launch(
    slots: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    offsets: torch.Tensor,
    longest: int,
    tokens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    made: StepInputs,
    block_table: torch.Tensor | None,
    *,
    decode: bool,
) -> None:
    table = pages if block_table is None else block_table
    prepare_inputs_kernel[(slots.shape[0], triton.cdiv(longest, BLOCK))](
        slots,
        starts,
        lengths,
        offsets,
        tokens,
        pages,
        made.token_ids,
        made.positions,
        made.slot_mapping,
        made.contexts,
        table,
        tokens.stride(0),
        pages.stride(0),
        table.stride(0),
        tokens.shape[0] - 1,
        PAGE=page_size,
        DECODE=decode,
        COPY=block_table is not None,
        BLOCK=BLOCK,
        num_warps=2,
        **pdl_options(slots.device),
    )


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _gather_pages(
    table: tl.tensor,
    slots: tl.tensor,
    indptr: tl.tensor,
    pages: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    first = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - first
    source = table + tl.load(slots + row).to(tl.int64) * stride
    for at in range(0, count, BLOCK):
        column = at + tl.arange(0, BLOCK)
        tl.store(pages + first + column, tl.load(source + column, column < count, 0), column < count)


def gather_pages(
    table: torch.Tensor, slots: torch.Tensor, indptr: torch.Tensor, *, total: int
) -> torch.Tensor:
    """The first pages of each of ``slots`` [R], one after another: int32[total], cut at ``indptr`` int32[R + 1]."""
    pages = torch.empty(total, dtype=torch.int32, device=table.device)
    _gather_pages[(len(slots),)](table, slots, indptr, pages, table.stride(0), BLOCK=BLOCK, num_warps=4)
    return pages
