"""Shared prefixes of a step's rows, in the form in which decode attention reads them (cascade attention).

``engine.shared_prefix`` finds groups of rows whose contexts begin with the same pages, and packs what follows from
that into one int32 array, which the host sends to the device with the step.
"""

from dataclasses import dataclass
from typing import Final

import torch

MIN_WORK_ITEMS: Final = 64
WORK_ITEM_FIELDS: Final = 5
MAX_PREFIX_SPLITS_PER_STEP: Final = 2048
"""Room for splits of prefixes, of all rows of a step together."""
MAX_PREFIX_SPLITS: Final = 32


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """The shared prefixes of R rows, int32 on the device.

    prefix_lens     [R]: the first tokens of the row, which its group reads; 0 for rows without a group
    prefix_splits   [R]: the splits in which they are read, ``max_splits`` at most
    row_order       [R]: row numbers, group by group
    work_items      [5, W]: the number of rows (0: unused), the place of the first in ``row_order``, the first token,
                    the token behind the last, and the number of the split
    """

    prefix_lens: torch.Tensor
    prefix_splits: torch.Tensor
    row_order: torch.Tensor
    work_items: torch.Tensor

    @property
    def max_splits(self) -> int:
        """Return the most splits that a prefix can have in this step."""
        return max_prefix_splits(len(self.prefix_lens))


def max_work_items(rows: int) -> int:
    """Return W, the most work items of a step of ``rows`` rows."""
    return max(rows, MIN_WORK_ITEMS)


def max_prefix_splits(rows: int) -> int:
    """Return the most splits of one prefix in a step of ``rows`` rows."""
    return max(1, min(MAX_PREFIX_SPLITS, MAX_PREFIX_SPLITS_PER_STEP // rows))


def packed_size(rows: int) -> int:
    """Return the length of the packed array for ``rows`` rows."""
    return 3 * rows + WORK_ITEM_FIELDS * max_work_items(rows)


def unpack_shared_prefixes(packed: torch.Tensor, rows: int) -> SharedPrefixes:
    """View int32 [packed_size(rows)] as its fields, which stand one after another."""
    prefix_lens, prefix_splits, row_order, work_items = torch.split(
        packed, [rows, rows, rows, WORK_ITEM_FIELDS * max_work_items(rows)]
    )
    return SharedPrefixes(prefix_lens, prefix_splits, row_order, work_items.view(WORK_ITEM_FIELDS, -1))
