"""Assembles a step's inputs from the device's own tables, without asking the host for a token."""

import torch


def rows_of_tokens(lengths: torch.Tensor, total: int) -> torch.Tensor:
    """[R] -> int64[total]: the row to which each of the step's tokens belongs."""
    rows = torch.arange(lengths.shape[0], device=lengths.device)
    return rows.repeat_interleave(lengths, output_size=total)


def read_cells(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Values int64[N] of cells (``rows[i]``, ``columns[i]``) of an int32 table."""
    return table.view(-1).index_select(0, rows * table.shape[1] + columns).long()


def write_cells(table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
    """Set cells (``rows[i]``, ``columns[i]``) of an int32 table; no cell may be named twice."""
    table.view(-1).index_copy_(0, rows * table.shape[1] + columns, values.to(table.dtype))
