"""Which rows read a prefix together: against tries written out, over random page tables."""

import itertools
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from skiff_runtime.engine.shared_prefix import MIN_SAVED_TOKENS, SharedPrefixFinder, cut, shared_prefixes
from skiff_runtime.kernels.shared_prefixes import WORK_ITEM_FIELDS, max_prefix_splits, max_work_items
from skiff_runtime.step import Int32, StepPlan

PAGE = 16


def pages_of(paths: list[list[int]]) -> Int32:
    """The pages of rows whose segments read so: equal ones where all before is equal, too; -1 after the end."""
    known: dict[tuple[int, ...], int] = {}
    ends = np.full((len(paths), max(map(len, paths))), -1, np.int32)
    for row, path in enumerate(paths):
        for column in range(len(path)):
            ends[row, column] = known.setdefault(tuple(path[: column + 1]), len(known))
    return ends


def common_to(paths: list[list[int]]) -> int:
    """How many first segments are the same in all."""
    return next(
        (at for at, segments in enumerate(zip(*paths, strict=False)) if len(dict.fromkeys(segments)) > 1),
        min(map(len, paths)),
    )


PATHS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=2, max_size=14)


@given(paths=PATHS)
@settings(max_examples=300, deadline=None)
def test_a_group_holds_what_it_shares_and_reads_little_twice(paths: list[list[int]]) -> None:
    ends, whole = pages_of(paths), np.array([len(path) for path in paths], np.int32)
    groups, depths = shared_prefixes(ends, whole)
    saved = 0
    for leader in np.unique(groups).tolist():
        rows = np.flatnonzero(groups == leader)
        depth = depths[rows[0]]
        assert leader in rows and (depths[rows] == depth).all() and (whole[rows] >= depth).all()
        assert (ends[rows, :depth] == ends[leader, :depth]).all()
        assert (depth > 0) == (len(rows) > 1)
        saved += (len(rows) - 1) * int(depth)
    _, first, member, sizes = np.unique(
        ends[:, 0], return_index=True, return_inverse=True, return_counts=True
    )
    common = [
        common_to([paths[row] for row in np.flatnonzero(member == group)]) for group in range(len(first))
    ]
    assert saved >= int(((sizes - 1) * common).sum()), "grouping by the first segment alone saves more"


def test_longer_prefixes_win_where_they_save_more() -> None:
    """A system prompt of one segment for all, and a document of eight for each pair."""
    paths = [[9, *([pair] * 8), 10 + row] for pair in range(3) for row in (2 * pair, 2 * pair + 1)]
    groups, depths = shared_prefixes(pages_of(paths), np.full(6, 10, np.int32))
    assert groups.tolist() == [0, 0, 2, 2, 4, 4] and depths.tolist() == [9] * 6
    groups, depths = shared_prefixes(pages_of([[*([9] * 8), pair, row] for pair, row in PAIRS]), TEN)
    assert groups.tolist() == [0] * 6 and depths.tolist() == [8] * 6


PAIRS = [(row // 2, row) for row in range(6)]
TEN = np.full(6, 10, np.int32)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 80)), min_size=1, max_size=12),
    members=st.integers(2, 16),
    padding=st.integers(0, 9),
    seed=st.integers(0, 9),
)
@settings(max_examples=300, deadline=None)
def test_work_is_cut_without_gaps(
    sizes: list[tuple[int, int]], members: int, padding: int, seed: int
) -> None:
    """Each row of a group finds each token of its prefix in exactly one piece, in the part that the piece names."""
    counts = [count for count, _ in sizes]
    groups = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    tokens = np.repeat(np.array([128 * each * (n > 1) for n, each in sizes], np.int32), counts)
    shuffled = np.random.default_rng(seed).permutation(len(groups))
    groups, tokens = groups[shuffled], tokens[shuffled]
    rows = len(groups) + padding
    assume(tokens.any())
    packed = cut(groups, tokens, members=members, rows=rows)
    skipped, parts, order, items = np.split(packed, [rows, 2 * rows, 3 * rows])
    assert skipped[: len(groups)].tolist() == tokens.tolist() and not skipped[len(groups) :].any()
    assert parts.max() <= max_prefix_splits(rows) and not parts[len(groups) :].any()
    seen: dict[tuple[int, int], tuple[int, int]] = {}
    for count, first, begin, end, part in items.reshape(WORK_ITEM_FIELDS, max_work_items(rows)).T.tolist():
        for row in order[first : first + count].tolist():
            assert count <= members and begin < end and (row, part) not in seen
            seen[row, part] = begin, end
    for row in range(len(groups)):
        spans = [seen.pop((row, part)) for part in range(parts[row])]
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


def test_a_slot_that_opens_anew_shares_nothing_of_the_past() -> None:
    held = MIN_SAVED_TOKENS // PAGE
    pages = SharedPrefixFinder(3, 2 * MIN_SAVED_TOKENS, PAGE, members=16)
    pages.apply(plan([(slot, column, column) for slot in (0, 2) for column in range(held)], [0, 2]))
    slots, starts = np.array([2, 0], np.int32), np.full(2, MIN_SAVED_TOKENS + 5, np.int32)
    found = pages.find(slots, starts, 4)
    assert found is not None and found[:4].tolist() == [MIN_SAVED_TOKENS, MIN_SAVED_TOKENS, 0, 0]
    assert pages.find(slots, starts - 6, 4) is found, "nothing has changed but the contexts"
    pages.apply(plan([(0, column, 1000 + column) for column in range(held)], [0]))
    assert pages.find(slots, starts, 4) is None


@pytest.mark.parametrize("common", [0, 128, 384])
def test_a_long_context_among_short_ones_is_read_in_parts(common: int) -> None:
    """Whether or not it has a little in common with the others."""
    count, long, short = 32, 20_000, 500
    pages = SharedPrefixFinder(count, 2 * long, PAGE, members=16)
    starts = np.full(count, short, np.int32)
    slots = np.arange(count, dtype=np.int32)
    lengths = [long if slot == 5 else short for slot in range(count)]
    numbers = itertools.count(common // PAGE)
    cells = [
        (slot, column, column if column < common // PAGE else next(numbers))
        for slot in range(count)
        for column in range(lengths[slot] // PAGE)
    ]
    pages.apply(plan(cells, list(range(count))))
    found = pages.find(slots, starts, count)
    assert found is None or found[:count].max() == common
    starts[5] = long
    pages.apply(plan([], [count - 1]))
    found = pages.find(slots, starts, count)
    assert found is not None
    skipped, parts = found[:count], found[count : 2 * count]
    assert skipped[5] == long // 128 * 128 and parts[5] >= 16
    others = np.delete(skipped, [5, count - 1])  # the last one was opened anew
    assert others.max() == others.min() == common and skipped[-1] == 0


def test_little_in_common_does_not_pay() -> None:
    held = MIN_SAVED_TOKENS // PAGE
    pages = SharedPrefixFinder(2, 2 * MIN_SAVED_TOKENS, PAGE, members=16)
    pages.apply(plan([(slot, column, column) for slot in (0, 1) for column in range(held - 1)], [0, 1]))
    assert pages.find(np.array([0, 1], np.int32), np.full(2, MIN_SAVED_TOKENS, np.int32), 2) is None
