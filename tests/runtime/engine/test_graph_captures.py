"""The order of CUDA graph captures, and what happens where their memory lacks."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from skiff_runtime.engine.graph_captures import CaptureTask, GraphCaptures, order_captures


def make_tasks(sizes: list[int], done: list[int], needed: int = 0) -> list[CaptureTask]:
    return [CaptureTask(size, lambda size=size: done.append(size), needed + size) for size in sizes]  # type: ignore[misc]


def always(_: object) -> bool:
    return True


def test_largest_graph_and_those_of_few_rows_come_first() -> None:
    early, deferred = order_captures(
        make_tasks([64, 48, 32, 16, 8, 4, 2, 1], []), make_tasks([2048, 1024, 128, 64], [])
    )
    assert [task.size for task in early] == [64, 8, 4, 2, 1]
    assert [task.size for task in deferred] == [16, 32, 48, 2048, 64, 128, 1024]


@pytest.mark.parametrize(("rows", "expected"), [([8, 4, 2, 1], 4), ([1], 1), ([], 0)])
def test_engine_of_few_rows_defers_no_decode_graph(rows: list[int], expected: int) -> None:
    early, deferred = order_captures(make_tasks(rows, []), [])
    assert (len(early), len(deferred)) == (expected, 0)


def test_deferred_captures_run_one_by_one_until_none_is_left() -> None:
    done: list[int] = []
    captures = GraphCaptures(make_tasks([9], done), make_tasks([5, 7], done), has_room=always, all_ranks=bool)
    assert (captures.num_early, captures.num_deferred) == (1, 2)
    captures.capture_early()
    for _ in range(4):
        captures.capture_deferred()
    assert done == [9, 5, 7]
    assert (captures.num_early, captures.num_deferred) == (0, 0)


def test_captures_are_given_up_for_good_where_memory_lacks() -> None:
    done: list[int] = []
    free = 1005
    captures = GraphCaptures(
        [], make_tasks([5, 7, 3], done, 1000), has_room=lambda needed: needed <= free, all_ranks=bool
    )
    assert captures.deferred_bytes == 3015
    captures.capture_deferred()
    captures.capture_deferred()
    assert captures.num_deferred == 0
    free = 1 << 40
    captures.capture_deferred()
    assert done == [5]


def test_ranks_give_up_together() -> None:
    """Rank 1 lacks memory for the second graph; a capture of rank 0 alone would wait for it in a collective."""
    barrier, votes = Barrier(2, timeout=30), [True, True]
    done: list[list[int]] = [[], []]

    def make_vote(rank: int) -> Callable[[bool], bool]:
        def all_ranks(ok: bool) -> bool:
            votes[rank] = ok
            barrier.wait()
            result = all(votes)
            barrier.wait()
            return result

        return all_ranks

    def run(rank: int) -> None:
        free = (1 << 40, 6)[rank]
        captures = GraphCaptures(
            [],
            make_tasks([5, 7, 3], done[rank]),
            has_room=lambda needed: needed <= free,
            all_ranks=make_vote(rank),
        )
        for _ in range(3):
            captures.capture_deferred()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert done == [[5], [5]]
