"""The inputs of a step's model run, gathered from the token table and the page table on the device.

So no token has to come to the host and back between two steps.
"""

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl

from skiff_runtime.kernels.step_inputs import StepInputs
from skiff_runtime.kernels.triton.runtime.dependent_launch import (
    launch_dependents,
    pdl_options,
    wait_for_dependencies,
)

BLOCK: Final = 256
"""Tokens, cells or pages that a program handles at a time; not compared with others."""


@triton.jit(do_not_specialize=["count"])
def write_cells_kernel(
    table: tl.tensor,
    cells: tl.tensor,
    stride: tl.tensor,
    count: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Write one block of cells.

    Grid: (blocks of BLOCK cells).

    table               int32, rows ``stride`` apart, changed in place
    cells               int32 [3, count]: rows, columns, values
    """
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    row = tl.load(cells + index, inside, 0).to(tl.int64)
    column = tl.load(cells + count + index, inside, 0)
    value = tl.load(cells + 2 * count + index, inside, 0)
    tl.store(table + row * stride + column, value.to(table.dtype.element_ty), inside)


def write_cells(table: torch.Tensor, cells: torch.Tensor) -> None:
    """Do what ``kernels.prepare_inputs.write_cells`` does."""
    count = cells.shape[1]
    write_cells_kernel[(triton.cdiv(count, BLOCK),)](
        table, cells, table.stride(0), count, BLOCK=BLOCK, num_warps=4
    )


@triton.jit(do_not_specialize_on_alignment=["slots", "starts", "lengths", "offsets"])
def prepare_inputs_kernel(
    slots: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    offsets: tl.tensor,
    tokens: tl.tensor,
    page_table: tl.tensor,
    token_ids: tl.tensor,
    positions: tl.tensor,
    slot_mapping: tl.tensor,
    seq_lens: tl.tensor,
    block_table: tl.tensor,
    tokens_stride: tl.tensor,
    page_table_stride: tl.tensor,
    block_table_stride: tl.tensor,
    padding_slot: tl.tensor,
    PAGE: tl.constexpr,
    DECODE: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
) -> None:
    """Write the inputs of one block of one row's tokens.

    Grid: (rows, blocks of BLOCK tokens of the longest row). The first program of a row also writes its length and,
    with COPY, its pages.

    slots, starts       int32 [rows]: the row's slot, and the position of its first token in this step
    lengths, offsets    int32 [rows]: its tokens in this step, and the place of the first among all; with DECODE every
                        row has one token and these are not read
    tokens              int32 [slots, n], rows ``tokens_stride`` apart: the token table
    page_table          int32 [slots, P], rows ``page_table_stride`` apart
    token_ids, positions  int32 [T], written
    slot_mapping        int64 [T], written: the token's place in the KV pool, -1 for tokens of ``padding_slot``
    seq_lens            int32 [rows], written: start + length
    block_table         int32 [rows, P], rows ``block_table_stride`` apart, written with COPY: the pages of each row
    """
    launch_dependents(PDL)
    wait_for_dependencies(PDL)
    row = tl.program_id(0)
    block = tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    start = tl.load(starts + row)
    if DECODE:
        index = tl.arange(0, 1)
        length = 1
        offset = row
    else:
        index = block * BLOCK + tl.arange(0, BLOCK)
        length = tl.load(lengths + row)
        offset = tl.load(offsets + row)
    inside = index < length
    position = start + index
    token = tl.load(tokens + slot * tokens_stride + position, inside, 0)
    page = tl.load(page_table + slot * page_table_stride + position // PAGE, inside, 0)
    location = tl.where(slot == padding_slot, -1, page.to(tl.int64) * PAGE + position % PAGE)
    tl.store(token_ids + offset + index, token, inside)
    tl.store(positions + offset + index, position, inside)
    tl.store(slot_mapping + offset + index, location, inside)
    if block == 0:
        tl.store(seq_lens + row, start + length)
        if COPY:
            num_pages = tl.cdiv(start + length, PAGE)
            for first in range(0, num_pages, BLOCK):
                column = first + tl.arange(0, BLOCK)
                source = page_table + slot * page_table_stride + column
                target = block_table + row.to(tl.int64) * block_table_stride + column
                tl.store(target, tl.load(source, column < num_pages, 0), column < num_pages)


def fill_decode_inputs(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    inputs: StepInputs,
    block_table: torch.Tensor | None,
) -> None:
    """Fill ``inputs`` of rows of one token each, as ``kernels.prepare_inputs.prepare_decode_inputs`` does."""
    slots, starts = rows.unbind()
    _launch(
        (slots, starts, starts, starts), 1, tokens, page_table, page_size, inputs, block_table, decode=True
    )


def fill_mixed_inputs(
    rows: torch.Tensor,
    max_len: int,
    tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    inputs: StepInputs,
    block_table: torch.Tensor | None,
) -> None:
    """Fill ``inputs`` of rows of up to ``max_len`` tokens, as ``kernels.prepare_inputs.prepare_inputs`` does."""
    _launch(rows.unbind(), max_len, tokens, page_table, page_size, inputs, block_table, decode=False)


def _launch(
    columns: Sequence[torch.Tensor],
    max_len: int,
    tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    inputs: StepInputs,
    block_table: torch.Tensor | None,
    *,
    decode: bool,
) -> None:
    """Launch ``prepare_inputs_kernel``; ``columns`` are slots, starts, lengths and offsets."""
    # Without a block table the kernel never reads the argument; the page table stands in for it.
    target = page_table if block_table is None else block_table
    slots = columns[0]
    prepare_inputs_kernel[(slots.shape[0], triton.cdiv(max_len, BLOCK))](
        *columns,
        tokens,
        page_table,
        inputs.token_ids,
        inputs.positions,
        inputs.slot_mapping,
        inputs.seq_lens,
        target,
        tokens.stride(0),
        page_table.stride(0),
        target.stride(0),
        tokens.shape[0] - 1,
        PAGE=page_size,
        DECODE=decode,
        COPY=block_table is not None,
        BLOCK=BLOCK,
        num_warps=2,
        **pdl_options(slots.device),
    )


@triton.jit(do_not_specialize_on_alignment=["slots"])
def gather_pages_kernel(
    page_table: tl.tensor,
    slots: tl.tensor,
    indptr: tl.tensor,
    pages: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Copy the pages of one row.

    Grid: (rows).

    page_table          int32 [slots, P], rows ``stride`` apart
    slots               int32 [rows]
    indptr              int32 [rows + 1]: where the pages of each row begin among all
    pages               int32 [indptr[rows]], written
    """
    row = tl.program_id(0)
    first = tl.load(indptr + row)
    count = tl.load(indptr + row + 1) - first
    source = page_table + tl.load(slots + row).to(tl.int64) * stride
    for at in range(0, count, BLOCK):
        column = at + tl.arange(0, BLOCK)
        tl.store(pages + first + column, tl.load(source + column, column < count, 0), column < count)


def gather_pages(
    page_table: torch.Tensor, slots: torch.Tensor, indptr: torch.Tensor, *, total: int
) -> torch.Tensor:
    """Return the first pages of each of ``slots`` [R], one after another, as FlashInfer wants them: int32 [total].

    Row i has ``indptr[i + 1] - indptr[i]`` pages; ``indptr`` is int32 [R + 1].
    """
    pages = torch.empty(total, dtype=torch.int32, device=page_table.device)
    gather_pages_kernel[(len(slots),)](
        page_table, slots, indptr, pages, page_table.stride(0), BLOCK=BLOCK, num_warps=4
    )
    return pages
