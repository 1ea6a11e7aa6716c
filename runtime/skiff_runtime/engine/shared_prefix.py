"""Shared prefixes of decode rows (cascade attention): groups of rows with common pages, and the work of reading these.

Rows with a common prefix read its K and V once for all of them. The prefixes are found on the host, in numpy, and split
into work items of about equal size for a GPU kernel. A row much longer than the others is split by the same means,
so that the GPU does not wait for it alone.

Two page tables contain the same page only if all tokens before the page's end are equal, so one page in common means a
whole prefix in common. All of this follows from the plans alone, so every run repeats it.
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
from skiff_runtime.kernels.tuning import SharedPrefixTuning
from skiff_runtime.step import Int32, StepPlan

SEGMENT_TOKENS: Final = 128
"""Unit in which prefixes are compared and shared: this many tokens, or one page if that is more."""
LEVELS: Final = 4
"""Bound of the levels at which groups are divided in search of longer prefixes."""


class SharedPrefixFinder:
    """Finds shared prefixes by the last page of each segment, kept by slot (-1 where it is not known)."""

    def __init__(
        self, slots: int, max_model_len: int, page_size: int, *, max_rows: int, tuning: SharedPrefixTuning
    ) -> None:
        """``max_rows`` rows can read a prefix together; ``tuning`` has the thresholds of profitability."""
        self._max_rows = max_rows
        self._tuning = tuning
        self._cached_for = 0, b""
        self._cached: tuple[Int32 | None] | None = None
        self._segment_pages = max(1, SEGMENT_TOKENS // page_size)
        self._segment_tokens = self._segment_pages * page_size
        self._segment_ends = np.full((slots + 1, max(1, max_model_len // self._segment_tokens)), -1, np.int32)

    def apply(self, plan: StepPlan) -> None:
        """Record the slots that the plan opens and the pages that it assigns."""
        for opened in plan.opened:
            self._segment_ends[opened.slot] = -1
        # The last page of a segment stands for all of it, because a page implies all tokens before its end.
        last = plan.page_columns % self._segment_pages == self._segment_pages - 1
        columns = plan.page_columns[last] // self._segment_pages
        inside = columns < self._segment_ends.shape[1]
        self._segment_ends[plan.page_slots[last][inside], columns[inside]] = plan.page_ids[last][inside]
        if plan.opened or len(columns):
            self._cached = None

    def find(self, slots: Int32, starts: Int32, rows: int) -> Int32 | None:
        """Find the prefixes that decode rows of ``slots`` [R] share before their tokens at ``starts``.

        Returns ``SharedPrefixes`` packed for a step of ``rows`` rows, or None if sharing is not profitable. The result
        is cached: a plan that neither opens a slot nor ends a segment does not change it.
        """
        if self._cached is None or self._cached_for != (rows, slots.tobytes()):
            self._cached_for = rows, slots.tobytes()
            self._cached = (self._search(slots, starts, rows),)
        return self._cached[0]

    def _search(self, slots: Int32, starts: Int32, rows: int) -> Int32 | None:
        segments = starts // self._segment_tokens
        ends = self._segment_ends[slots, : int(segments.max(initial=0))]
        if len(slots) < 2 or ends.shape[1] == 0:
            return None
        groups, shared_segments = group_by_prefix(ends, segments)
        tokens = shared_segments * np.int32(self._segment_tokens)
        leaders = groups == np.arange(len(groups))
        saved = int(tokens.sum() - tokens[leaders].sum())
        long = _find_long(starts - tokens, self._tuning)
        min_saved = max(self._tuning.min_saved_tokens, self._tuning.min_saved_fraction * int(starts.sum()))
        if saved < min_saved and not long.any():
            return None
        # A long row becomes a group of its own, so that its whole context is split into work items.
        tokens[long] = segments[long] * self._segment_tokens
        groups[long] = len(groups) + np.flatnonzero(long)
        return pack_work_items(
            groups,
            tokens,
            max_rows=self._max_rows,
            rows=rows,
            min_split_tokens=self._tuning.min_split_tokens,
        )


def _find_long(tokens: Int32, tuning: SharedPrefixTuning) -> NDArray[np.bool_]:
    """Return which rows, that read ``tokens`` int32[R] each, would keep the GPU waiting."""
    total = int(tokens.sum())
    limit = max(tuning.long_tokens, total * max(tuning.long_fraction, tuning.long_means / len(tokens)))
    return np.greater(tokens, limit)


def group_by_prefix(ends: Int32, segments: Int32) -> tuple[Int32, Int32]:
    """Group rows by their prefixes: returns (group, number of shared segments) of each row, two int32[R].

    ``ends`` int32[R, S] are the last pages of segments, and the first ``segments`` int32[R] of each row count. A group
    is named by the index of one of its rows.

    The search goes from the first segment to longer prefixes, ``LEVELS`` times at most. At each level, rows that agree
    in the next segment form candidate groups, and each candidate is extended by all segments that its rows have in
    common. A group of n rows and d segments saves (n - 1) * d reads. So the candidates inside a group replace it only
    if they save more together than the group does.
    """
    count = len(ends)
    rows = np.arange(count, dtype=np.int32)
    known = (np.arange(ends.shape[1]) < segments[:, None]) & (ends >= 0)
    groups, depths = rows.copy(), np.zeros(count, np.int32)
    parents, savings = np.zeros(count, np.int64), np.zeros(1, np.int64)
    column, is_open = np.zeros(count, np.int32), np.ones(count, np.bool_)
    for _ in range(LEVELS):
        at = np.minimum(column, ends.shape[1] - 1)
        is_open &= (column < ends.shape[1]) & known[rows, at]
        # A closed row gets a key of its own, so that it stays alone.
        keys = np.where(is_open, ends[rows, at], -1 - rows)
        _, first, member, size = np.unique(keys, return_index=True, return_inverse=True, return_counts=True)
        if size.max() == 1:
            break
        lengths = _common_lengths(ends, known, first[member], member, len(size))
        saving = (size - 1) * lengths
        children = np.bincount(parents[first], weights=saving, minlength=len(savings))
        better = (children > savings)[parents]
        groups = np.where(better, first[member], groups).astype(np.int32)
        depths = np.where(better, np.where(size > 1, lengths, 0)[member], depths).astype(np.int32)
        is_open &= better & (size > 1)[member]
        parents, savings, column = member, saving, lengths[member].astype(np.int32)
    return groups, depths


def _common_lengths(
    ends: Int32,
    known: NDArray[np.bool_],
    leaders: NDArray[np.int64],
    member: NDArray[np.int64],
    groups: int,
) -> NDArray[np.int64]:
    """Return the number of segments that all rows of a group have in common with its first row, int64[groups]."""
    same = (ends == ends[leaders]) & known
    lengths = np.where(same.all(1), ends.shape[1], same.argmin(1))
    common = np.full(groups, ends.shape[1], np.int64)
    np.minimum.at(common, member, lengths)
    return common


def pack_work_items(
    groups: Int32, tokens: Int32, *, max_rows: int, rows: int, min_split_tokens: int
) -> Int32:
    """Split prefixes of ``tokens`` int32[R] into work items; returns ``kernels.shared_prefixes.SharedPrefixes``, packed.

    A group's rows are divided into blocks of at most ``max_rows``, and its prefix into splits of about the same size over
    all groups, of at least ``min_split_tokens`` tokens. An item is one split of one block. The result is packed for a
    step of ``rows`` rows.
    """
    order = np.lexsort((groups, tokens == 0)).astype(np.int32)  # rows without a prefix come last
    used = int((tokens > 0).sum())
    ordered = groups[order[:used]]
    group_starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    sizes = np.diff(np.r_[group_starts, used])
    lengths = tokens[order[group_starts]]
    blocks = -(-sizes // max_rows)
    splits = _choose_splits(lengths, blocks, max_work_items(rows), max_prefix_splits(rows), min_split_tokens)
    group, block = _enumerate_within(blocks)
    block_of_item, split = _enumerate_within(splits[group])
    group, block = group[block_of_item], block[block_of_item]
    split_tokens = -(-lengths // splits)
    packed = np.zeros(packed_size(rows), np.int32)
    prefix_lens, row_splits, row_order, items = np.split(packed, [rows, 2 * rows, 3 * rows])
    prefix_lens[: len(tokens)], row_order[: len(order)] = tokens, order
    row_splits[order[:used]] = np.repeat(splits, sizes)
    items.reshape(WORK_ITEM_FIELDS, -1)[:, : len(split)] = (
        np.minimum(max_rows, sizes[group] - block * max_rows),
        group_starts[group] + block * max_rows,
        split * split_tokens[group],
        np.minimum((split + 1) * split_tokens[group], lengths[group]),
        split,
    )
    return packed


def _enumerate_within(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (index of the entry, offset inside it) of each of the sum(counts) things that the entries count."""
    entry = np.repeat(np.arange(len(counts)), counts)
    return entry, np.arange(len(entry)) - np.repeat(np.cumsum(counts) - counts, counts)


def _choose_splits(
    lengths: Int32, blocks: NDArray[np.int64], max_items: int, max_splits: int, min_split_tokens: int
) -> NDArray[np.int64]:
    """Return the number of splits of each group's prefix, int64[groups], for at most ``max_items`` items in total."""
    spare = max(1, max_items - int(blocks.sum()))
    split_tokens = max(min_split_tokens, -(-int((lengths * blocks).sum()) // spare))
    return np.minimum(max_splits, -(-lengths // split_tokens)).astype(np.int64)
