"""What rows of a step have in common, as decode kernels read it."""

from dataclasses import dataclass
from typing import Final

import torch

MIN_WORK_ITEMS: Final = 64
WORK_ITEM_FIELDS: Final = 5
PARTS: Final = 2048
"""Parts of prefixes, of all rows of a step together, for which there is room."""
MAX_PARTS: Final = 32


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """For R rows, int32 on the device.

    Of each row, ``skipped`` [R] tokens are read for its group, in ``parts`` [R] parts, ``max_prefix_splits`` at most.
    ``order`` [R] names the rows group by group. ``items`` [5, W] are pieces of work: how many rows (0: none), the place
    of the first in ``order``, the first token, the token after the last one, and which part of the prefix it is.
    """

    skipped: torch.Tensor
    parts: torch.Tensor
    order: torch.Tensor
    items: torch.Tensor

    @property
    def max_prefix_splits(self) -> int:
        """Parts of one row, at most."""
        return max_prefix_splits(len(self.skipped))


def max_work_items(rows: int) -> int:
    """W: pieces of work of a step of so many rows, at most."""
    return max(rows, MIN_WORK_ITEMS)


def max_prefix_splits(rows: int) -> int:
    """Parts of one prefix, at most, in a step of so many rows."""
    return max(1, min(MAX_PARTS, PARTS // rows))


def packed_size(rows: int) -> int:
    """Numbers of all of it."""
    return 3 * rows + WORK_ITEM_FIELDS * max_work_items(rows)


def unpack(numbers: torch.Tensor, rows: int) -> SharedPrefixes:
    """From int32[packed_size(rows)]: the fields one after another."""
    skipped, parts, order, items = torch.split(
        numbers, [rows, rows, rows, WORK_ITEM_FIELDS * max_work_items(rows)]
    )
    return SharedPrefixes(skipped, parts, order, items.view(WORK_ITEM_FIELDS, -1))
