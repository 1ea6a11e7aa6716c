"""Assembly of a step's inputs from the device's own tables: no token has to come to the host for the next step."""

from dataclasses import fields

import torch

from skiff_runtime.kernels.step_inputs import StepInputs, empty_step_inputs


def prepare_inputs(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    *,
    total: int,
    max_len: int,
    block_table: torch.Tensor | None = None,
) -> StepInputs:
    """Assemble the inputs of ``total`` tokens in rows of at most ``max_len``.

    rows            int32 [4, R]: slots, starts (the position of the row's first token), lengths, offsets (its place
                    among all tokens)
    tokens          int32 [slots, n]: the token table
    page_table      int32 [slots, P]
    block_table     int32 [R, P] or None: the rows' pages are copied into it

    The last slot is the padding slot: the K and V of its tokens go nowhere (a slot mapping of -1).
    """
    if rows.device.type == "cuda":
        from skiff_runtime.kernels.triton import prepare_inputs as kernel

        inputs = empty_step_inputs(total, rows.shape[1], rows.device)
        kernel.fill_mixed_inputs(rows, max_len, tokens, page_table, page_size, inputs, block_table)
        return inputs
    slots, starts, lengths, offsets = rows.long().unbind()
    row_of_token = torch.arange(rows.shape[1]).repeat_interleave(lengths, output_size=total)
    positions = torch.arange(total) + (starts - offsets)[row_of_token]
    slot_of_token = slots[row_of_token]
    pages = read_cells(page_table, slot_of_token, positions // page_size)
    slot_mapping = pages * page_size + positions % page_size
    if block_table is not None:
        block_table.copy_(page_table[slots])
    return StepInputs(
        token_ids=read_cells(tokens, slot_of_token, positions),
        positions=positions,
        slot_mapping=slot_mapping.masked_fill_(slot_of_token == tokens.shape[0] - 1, -1),
        seq_lens=(starts + lengths).int(),
    )


def prepare_decode_inputs(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    inputs: StepInputs,
    block_table: torch.Tensor | None,
) -> None:
    """Write the inputs of rows of one token each to ``inputs``; ``rows`` int32 [2, R] are slots and starts.

    The other arguments are those of ``prepare_inputs``.
    """
    if rows.device.type == "cuda":
        from skiff_runtime.kernels.triton import prepare_inputs as kernel

        kernel.fill_decode_inputs(rows, tokens, page_table, page_size, inputs, block_table)
        return
    count = rows.shape[1]
    ones = torch.ones(count, dtype=torch.int32)
    all_columns = torch.stack((*rows, ones, torch.arange(count, dtype=torch.int32)))
    prepared = prepare_inputs(
        all_columns, tokens, page_table, page_size, total=count, max_len=1, block_table=block_table
    )
    for field in fields(inputs):
        getattr(inputs, field.name).copy_(getattr(prepared, field.name))


def read_cells(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return the values int64 [N] of the cells (``rows[i]``, ``columns[i]``) of an int32 table."""
    return table.view(-1).index_select(0, rows * table.shape[1] + columns).long()


def write_cells(table: torch.Tensor, cells: torch.Tensor) -> None:
    """Set cells of an int32 table: ``cells`` int32 [3, N] are rows, columns and values.

    Of a cell that is named twice, as only those of padding rows may be, one of the values remains.
    """
    if cells.device.type == "cuda":
        from skiff_runtime.kernels.triton import prepare_inputs as kernel

        kernel.write_cells(table, cells)
        return
    rows, columns, values = cells.unbind()
    table.view(-1).index_copy_(0, rows.long() * table.shape[1] + columns, values)
