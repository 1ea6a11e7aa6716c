"""Which rows of a decode step hold the same pages, and how reading those once is cut into work for a GPU.

A row much longer than the others is cut into pieces by the same means, lest all wait for it.

A page stands in two page tables only where all tokens before its end are the same, so that one page in common is a
whole prefix in common. All of this is numpy on the host; it follows from the plans alone, so every run repeats it.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.kernels.shared_prefixes import (
    WORK_ITEM_FIELDS,
    max_prefix_splits,
    max_work_items,
    packed_size,
)
from skiff_runtime.step import Int32, StepPlan

SEGMENT_TOKENS: Final = 128
"""Prefixes are compared, and shared, in pieces of so many tokens (or of one page, if that is more)."""
LEVELS: Final = 4
"""So often groups are divided in search of longer prefixes."""
MIN_SAVED_TOKENS: Final = 4096
MIN_SAVED_SHARE: Final = 0.1
"""Reads of the cache that must be saved, in a step and of all it reads: else the extra launches cost more."""
MIN_PART_TOKENS: Final = 256
LONG_TOKENS: Final = 2048
LONG_SHARE: Final = 1 / 32
LONG_MEANS: Final = 4
"""A row is long that reads so many tokens by itself, such a share of all, and so many times the mean."""


class SharedPrefixFinder:
    """By slot, the last page of each segment; -1 where nothing is known."""

    def __init__(self, slots: int, max_model_len: int, page_size: int, *, members: int) -> None:
        """``members`` rows can read a prefix together."""
        self._members = members
        self._asked = 0, b""
        self._found: tuple[Int32 | None] | None = None
        self._pages = max(1, SEGMENT_TOKENS // page_size)
        self._segment = self._pages * page_size
        self._ends = np.full((slots + 1, max(1, max_model_len // self._segment)), -1, np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Take over what the plan opens, and which pages it gives."""
        for opened in plan.opened:
            self._ends[opened.slot] = -1
        last = plan.page_columns % self._pages == self._pages - 1
        columns = plan.page_columns[last] // self._pages
        inside = columns < self._ends.shape[1]
        self._ends[plan.page_slots[last][inside], columns[inside]] = plan.page_ids[last][inside]
        if plan.opened or len(columns):
            self._found = None

    def find(self, slots: Int32, starts: Int32, rows: int) -> Int32 | None:
        """What decode rows of ``slots`` [R] share before their tokens at ``starts``, packed for a step of ``rows``.

        None where it does not pay. Plans that neither open a slot nor end a segment change nothing.
        """
        if self._found is None or self._asked != (rows, slots.tobytes()):
            self._asked = rows, slots.tobytes()
            self._found = (self._search(slots, starts, rows),)
        return self._found[0]

    def _search(self, slots: Int32, starts: Int32, rows: int) -> Int32 | None:
        whole = starts // self._segment
        ends = self._ends[slots, : int(whole.max(initial=0))]
        if len(slots) < 2 or ends.shape[1] == 0:
            return None
        groups, segments = shared_prefixes(ends, whole)
        tokens = segments * np.int32(self._segment)
        leaders = groups == np.arange(len(groups))
        saved = int(tokens.sum() - tokens[leaders].sum())
        long = _long(starts - tokens)
        little = saved < MIN_SAVED_TOKENS or saved < MIN_SAVED_SHARE * int(starts.sum())
        if little and not long.any():
            return None
        tokens[long] = whole[long] * self._segment
        groups[long] = len(groups) + np.flatnonzero(long)  # each one of its own
        return cut(groups, tokens, members=self._members, rows=rows)


def _long(tokens: Int32) -> NDArray[np.bool_]:
    """Which rows, of so many tokens each, would keep a GPU waiting."""
    total = int(tokens.sum())
    most = max(LONG_TOKENS, total * max(LONG_SHARE, LONG_MEANS / len(tokens)))
    return np.greater(tokens, most)


def shared_prefixes(ends: Int32, whole: Int32) -> tuple[Int32, Int32]:
    """Groups of rows and the segments that each shares: two int32[R]; a group is named by one of its rows.

    ``ends`` int32[R, S] are pages, ``whole`` int32[R] the segments of each row that count. Rows are grouped by their
    first segment; where a group goes apart, its parts become groups of their own if more is read once that way.
    """
    count = len(ends)
    rows = np.arange(count, dtype=np.int32)
    known = (np.arange(ends.shape[1]) < whole[:, None]) & (ends >= 0)
    groups, depths = rows.copy(), np.zeros(count, np.int32)
    parents, gains = np.zeros(count, np.int64), np.zeros(1, np.int64)
    column, open_rows = np.zeros(count, np.int32), np.ones(count, np.bool_)
    for _ in range(LEVELS):
        at = np.minimum(column, ends.shape[1] - 1)
        open_rows &= (column < ends.shape[1]) & known[rows, at]
        keys = np.where(open_rows, ends[rows, at], -1 - rows)
        _, first, member, size = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        if size.max() == 1:
            break
        lengths = _common(ends, known, first[member], member, len(size))
        gain = (size - 1) * lengths
        children = np.bincount(parents[first], weights=gain, minlength=len(gains))
        better = (children > gains)[parents]
        groups = np.where(better, first[member], groups).astype(np.int32)
        depths = np.where(better, np.where(size > 1, lengths, 0)[member], depths).astype(np.int32)
        open_rows &= better & (size > 1)[member]
        parents, gains, column = member, gain, lengths[member].astype(np.int32)
    return groups, depths


def _common(
    ends: Int32,
    known: NDArray[np.bool_],
    leaders: NDArray[np.int64],
    member: NDArray[np.int64],
    groups: int,
) -> NDArray[np.int64]:
    """Segments that all rows of a group have in common with its first one: int64[groups]."""
    same = (ends == ends[leaders]) & known
    lengths = np.where(same.all(1), ends.shape[1], same.argmin(1))
    common = np.full(groups, ends.shape[1], np.int64)
    np.minimum.at(common, member, lengths)
    return common


def cut(groups: Int32, tokens: Int32, *, members: int, rows: int) -> Int32:
    """``kernels.prefixes.SharedPrefixes``, packed for ``rows`` rows, of prefixes of ``tokens`` int32[R].

    The work is cut into pieces of about the same size, none for more than ``members`` rows.
    """
    order = np.lexsort((groups, tokens == 0)).astype(np.int32)
    used = int((tokens > 0).sum())
    ordered = groups[order[:used]]
    group_starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    sizes = np.diff(np.r_[group_starts, used])
    lengths = tokens[order[group_starts]]
    blocks = -(-sizes // members)
    parts = _parts(lengths, blocks, max_work_items(rows), max_prefix_splits(rows))
    group, block = _counted(blocks)
    piece, part = _counted(parts[group])
    group, block = group[piece], block[piece]
    shares = -(-lengths // parts)
    packed = np.zeros(packed_size(rows), np.int32)
    skipped, row_parts, ordering, items = np.split(packed, [rows, 2 * rows, 3 * rows])
    skipped[: len(tokens)], ordering[: len(order)] = tokens, order
    row_parts[order[:used]] = np.repeat(parts, sizes)
    items.reshape(WORK_ITEM_FIELDS, -1)[:, : len(piece)] = (
        np.minimum(members, sizes[group] - block * members),
        group_starts[group] + block * members,
        part * shares[group],
        np.minimum((part + 1) * shares[group], lengths[group]),
        part,
    )
    return packed


def _counted(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of the many things that each entry counts: which entry, and the how-manieth of it."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)


def _parts(lengths: Int32, blocks: NDArray[np.int64], room: int, most: int) -> NDArray[np.int64]:
    """In how many parts each group's prefix is read, so that all blocks' parts fit into ``room``."""
    spare = max(1, room - int(blocks.sum()))
    share = max(MIN_PART_TOKENS, -(-int((lengths * blocks).sum()) // spare))
    return np.minimum(most, -(-lengths // share)).astype(np.int64)
