"""Assembles a step's inputs from the device's own tables, without asking the host for a token."""

from dataclasses import fields

import torch

from skiff_runtime.kernels.step_inputs import StepInputs, empty_step_inputs


def step_inputs(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    *,
    total: int,
    longest: int,
    block_table: torch.Tensor | None = None,
) -> StepInputs:
    """The inputs of ``total`` tokens in rows of at most ``longest``.

    ``rows`` int32[4, R] are slots, starts, lengths and first tokens; ``tokens`` int32[slots, n] and ``pages``
    int32[slots, P] are the tables. The last slot is nobody's: its K and V go nowhere (a location of -1).
    Where ``block_table`` int32[R, P] is given, the rows' pages are copied into it.
    """
    if rows.device.type == "cuda":
        from skiff_runtime.kernels.triton import step_inputs as inputs

        made = empty_step_inputs(total, rows.shape[1], rows.device)
        inputs.fill_mixed_inputs(rows, longest, tokens, pages, page_size, made, block_table)
        return made
    slots, starts, lengths, offsets = rows.long().unbind()
    owners = torch.arange(rows.shape[1]).repeat_interleave(lengths, output_size=total)
    positions = torch.arange(total) + (starts - offsets)[owners]
    owned = slots[owners]
    places = read_cells(pages, owned, positions // page_size) * page_size + positions % page_size
    if block_table is not None:
        block_table.copy_(pages[slots])
    return StepInputs(
        token_ids=read_cells(tokens, owned, positions),
        positions=positions,
        slot_mapping=places.masked_fill_(owned == tokens.shape[0] - 1, -1),
        contexts=(starts + lengths).int(),
    )


def prepare_decode_inputs(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
    made: StepInputs,
    block_table: torch.Tensor | None,
) -> None:
    """As ``step_inputs``, into ``made``, for rows of one token each: ``rows`` int32[2, R] are slots and starts."""
    if rows.device.type == "cuda":
        from skiff_runtime.kernels.triton import step_inputs as inputs

        inputs.prepare_decode_inputs(rows, tokens, pages, page_size, made, block_table)
        return
    count = rows.shape[1]
    ones = torch.ones(count, dtype=torch.int32)
    whole = torch.stack((*rows, ones, torch.arange(count, dtype=torch.int32)))
    found = step_inputs(whole, tokens, pages, page_size, total=count, longest=1, block_table=block_table)
    for field in fields(made):
        getattr(made, field.name).copy_(getattr(found, field.name))


def read_cells(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Values int64[N] of cells (``rows[i]``, ``columns[i]``) of an int32 table."""
    return table.view(-1).index_select(0, rows * table.shape[1] + columns).long()


def write_cells(table: torch.Tensor, cells: torch.Tensor) -> None:
    """Set cells of an int32 table: ``cells`` int32[3, N] are rows, columns and values; no cell may be named twice."""
    if table.device.type == "cuda":
        from skiff_runtime.kernels.triton import step_inputs as inputs

        inputs.write_cells(table, cells)
        return
    rows, columns, values = cells.unbind()
    table.view(-1).index_copy_(0, rows.long() * table.shape[1] + columns, values)
