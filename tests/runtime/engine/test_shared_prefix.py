"""Shared prefixes of decode rows: the grouping against explicit tries over random page tables, and the work items."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skiff_runtime.engine.shared_prefix import (
    SharedPrefixFinder,
    group_by_prefix,
    pack_work_items,
)
from skiff_runtime.kernels.shared_prefixes import WORK_ITEM_FIELDS, max_prefix_splits, max_work_items
from skiff_runtime.kernels.tuning import HOPPER
from skiff_runtime.step import Int32, StepPlan

PAGE = 16
TUNING = HOPPER.shared_prefix
MIN_SAVED = TUNING.min_saved_tokens


def segment_ends(paths: list[list[int]]) -> Int32:
    """Return the last pages of the rows' segments: equal where all segments so far are equal, -1 after the end."""
    known: dict[tuple[int, ...], int] = {}
    ends = np.full((len(paths), max(map(len, paths))), -1, np.int32)
    for row, path in enumerate(paths):
        for column in range(len(path)):
            ends[row, column] = known.setdefault(tuple(path[: column + 1]), len(known))
    return ends


def count_common(paths: list[list[int]]) -> int:
    """Count the first segments that are the same in all paths."""
    return next(
        (at for at, segments in enumerate(zip(*paths, strict=False)) if len(dict.fromkeys(segments)) > 1),
        min(map(len, paths)),
    )


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=2, max_size=14)


@given(paths=PATHS)
@settings(max_examples=300, deadline=None)
def test_groups_share_their_prefix_and_save_at_least_as_much_as_first_segments(
    paths: list[list[int]],
) -> None:
    ends, lengths = segment_ends(paths), np.array([len(path) for path in paths], np.int32)
    groups, depths = group_by_prefix(ends, lengths)
    saved = 0
    for leader in np.unique(groups).tolist():
        rows = np.flatnonzero(groups == leader)
        depth = depths[rows[0]]
        assert leader in rows and (depths[rows] == depth).all() and (lengths[rows] >= depth).all()
        assert (ends[rows, :depth] == ends[leader, :depth]).all()
        assert (depth > 0) == (len(rows) > 1)
        saved += (len(rows) - 1) * int(depth)
    _, first, member, sizes = np.unique(
        ends[:, 0], return_index=True, return_inverse=True, return_counts=True
    )
    common = [
        count_common([paths[row] for row in np.flatnonzero(member == group)]) for group in range(len(first))
    ]
    assert saved >= int(((sizes - 1) * common).sum()), "grouping by the first segment alone saves more"


def test_longer_prefixes_are_chosen_where_they_save_more() -> None:
    """All rows share a system prompt of one segment, and each pair shares a document of eight."""
    paths = [[9, *([pair] * 8), 10 + row] for pair in range(3) for row in (2 * pair, 2 * pair + 1)]
    groups, depths = group_by_prefix(segment_ends(paths), np.full(6, 10, np.int32))
    assert groups.tolist() == [0, 0, 2, 2, 4, 4] and depths.tolist() == [9] * 6
    groups, depths = group_by_prefix(segment_ends([[*([9] * 8), pair, row] for pair, row in PAIRS]), TEN)
    assert groups.tolist() == [0] * 6 and depths.tolist() == [8] * 6


PAIRS = [(row // 2, row) for row in range(6)]
TEN = np.full(6, 10, np.int32)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 80)), min_size=1, max_size=12),
    max_rows=st.integers(2, 16),
    padding=st.integers(0, 9),
    seed=st.integers(0, 9),
)
@settings(max_examples=300, deadline=None)
def test_work_items_cover_each_prefix_exactly_once(
    sizes: list[tuple[int, int]], max_rows: int, padding: int, seed: int
) -> None:
    """Each token of a row's prefix lies in exactly one work item of the row, in the split that the item names."""
    counts = [count for count, _ in sizes]
    groups = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    tokens = np.repeat(np.array([128 * each * (n > 1) for n, each in sizes], np.int32), counts)
    shuffled = np.random.default_rng(seed).permutation(len(groups))
    groups, tokens = groups[shuffled], tokens[shuffled]
    rows = len(groups) + padding
    assume(tokens.any())
    packed = pack_work_items(
        groups, tokens, max_rows=max_rows, rows=rows, min_split_tokens=TUNING.min_split_tokens
    )
    prefix_lens, splits, order, items = np.split(packed, [rows, 2 * rows, 3 * rows])
    assert prefix_lens[: len(groups)].tolist() == tokens.tolist() and not prefix_lens[len(groups) :].any()
    assert splits.max() <= max_prefix_splits(rows) and not splits[len(groups) :].any()
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    for count, first, begin, end, split in items.reshape(WORK_ITEM_FIELDS, max_work_items(rows)).T.tolist():
        for row in order[first : first + count].tolist():
            assert count <= max_rows and begin < end and (row, split) not in seen
            seen[row, split] = begin, end
    for row in range(len(groups)):
        spans = [seen.pop((row, split)) for split in range(splits[row])]
        edges = [0, *(end for _, end in spans)]
        assert [begin for begin, _ in spans] == edges[:-1] and edges[-1] == tokens[row]
    assert not seen


def plan(cells: list[tuple[int, int, int]], opened: list[int]) -> StepPlan:
    columns = np.array(cells, np.int32).reshape(-1, 3)
    slots = tuple(SimpleNamespace(slot=slot) for slot in opened)
    made: Any = SimpleNamespace(
        opened=slots, page_slots=columns[:, 0], page_columns=columns[:, 1], page_ids=columns[:, 2]
    )
    return cast(StepPlan, made)


def test_reopened_slot_shares_nothing_of_its_previous_request() -> None:
    held = MIN_SAVED // PAGE
    finder = SharedPrefixFinder(3, 2 * MIN_SAVED, PAGE, max_rows=16, tuning=TUNING)
    finder.apply(plan([(slot, column, column) for slot in (0, 2) for column in range(held)], [0, 2]))
    slots, starts = np.array([2, 0], np.int32), np.full(2, MIN_SAVED + 5, np.int32)
    found = finder.find(slots, starts, 4)
    assert found is not None and found[:4].tolist() == [MIN_SAVED, MIN_SAVED, 0, 0]
    assert finder.find(slots, starts - 6, 4) is found, (
        "only the contexts have changed, so the result is cached"
    )
    finder.apply(plan([(0, column, 1000 + column) for column in range(held)], [0]))
    assert finder.find(slots, starts, 4) is None


@pytest.mark.parametrize("common", [0, 128, 384])
def test_long_context_among_short_ones_is_split(common: int) -> None:
    """The long context is split whether or not it shares a short prefix with the others."""
    count, long, short = 32, 20_000, 500
    finder = SharedPrefixFinder(count, 2 * long, PAGE, max_rows=16, tuning=TUNING)
    starts = np.full(count, short, np.int32)
    slots = np.arange(count, dtype=np.int32)
    lengths = [long if slot == 5 else short for slot in range(count)]
    numbers = itertools.count(common // PAGE)
    cells = [
        (slot, column, column if column < common // PAGE else next(numbers))
        for slot in range(count)
        for column in range(lengths[slot] // PAGE)
    ]
    finder.apply(plan(cells, list(range(count))))
    found = finder.find(slots, starts, count)
    assert found is None or found[:count].max() == common
    starts[5] = long
    finder.apply(plan([], [count - 1]))
    found = finder.find(slots, starts, count)
    assert found is not None
    prefix_lens, splits = found[:count], found[count : 2 * count]
    assert prefix_lens[5] == long // 128 * 128 and splits[5] >= 16
    others = np.delete(prefix_lens, [5, count - 1])  # the last one was opened anew
    assert others.max() == others.min() == common and prefix_lens[-1] == 0


def test_short_shared_prefix_is_not_profitable() -> None:
    held = MIN_SAVED // PAGE
    finder = SharedPrefixFinder(2, 2 * MIN_SAVED, PAGE, max_rows=16, tuning=TUNING)
    finder.apply(plan([(slot, column, column) for slot in (0, 1) for column in range(held - 1)], [0, 1]))
    assert finder.find(np.array([0, 1], np.int32), np.full(2, MIN_SAVED, np.int32), 2) is None
