"""All-reduce over peer memory by Triton's interpreter: each rank is a process, and all map the same files."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from all_reduce_ranks import (
    EXCHANGES,
    KINDS,
    SIZES,
    come_late,
    exchange,
    fuse,
    multiply_and_fuse,
    refresh,
    sum_in_every_way,
    wait_in_vain,
    wait_state_kernel,
)
from rank_processes import Pools, rank_pools

from skiff_runtime.kernels.triton.all_reduce.gemv_all_reduce import fits_outputs
from skiff_runtime.kernels.triton.all_reduce.low_latency import fits_rows, low_latency_capacity
from skiff_runtime.kernels.triton.all_reduce.peer_memory import (
    CHANNELS,
    COLLECTIVES,
    LINE_BYTES,
    MAX_RANKS,
    SLOT_BYTES,
    SLOT_LINES,
    TIMED_OUT,
    WAITING,
    allocation_bytes,
)
from skiff_runtime.kernels.triton.all_reduce.push import push_capacity
from skiff_runtime.kernels.triton.all_reduce.push_norm import fits_push_rows
from skiff_runtime.kernels.triton.runtime.weight_prefetch import ROUND_LINES, plan_prefetch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu compares the compiled kernels")

REFRESH = 1 << 30
WRAP = 1 << 32


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    """The processes of the ranks; each test maps files of its own."""
    with rank_pools(tmp_path_factory.mktemp("pools")) as made:
        yield made


@pytest.mark.parametrize(
    ("ranks", "dtype", "first_epoch"),
    [(2, "float16", WRAP - 3), (2, "bfloat16", REFRESH - 2), (3, "float32", 1)],
)
def test_sums_are_those_of_rank_order_bit_for_bit(
    pools: Pools, tmp_path: Path, ranks: int, dtype: str, first_epoch: int
) -> None:
    """Also where all words are rewritten, and where the marks of LL words begin again at 0."""
    rounds = len(KINDS) * len(SIZES)
    results = pools(ranks).run(sum_in_every_way, str(tmp_path), dtype, first_epoch)
    assert all(result == results[0] for result in results)
    assert results[0]["wrong"] == [] and not results[0]["failed"]
    assert results[0]["epochs"][0] == rounds, "the first channel takes part in every message"
    assert 0 < sum(results[0]["epochs"][1:]) < rounds * CHANNELS


@pytest.mark.parametrize("kind", [*KINDS, "gemv", "barrier"])
def test_words_of_the_channels_that_take_part_are_rewritten_before_marks_repeat(
    pools: Pools, tmp_path: Path, kind: str
) -> None:
    """Also those of the rank's own memory, which a fused product reads, whichever kernel makes the call."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    all_words, none = [True, True], [False, False]
    assert pools(2).run(refresh, str(tmp_path / "first"), kind, REFRESH) == [[all_words, none]] * 2
    assert pools(2).run(refresh, str(tmp_path / "second"), kind, REFRESH + 2) == [[none, none]] * 2


@pytest.mark.parametrize(
    ("ranks", "dtype", "shapes"), [(2, "float32", 4), (2, "float16", 3), (3, "float16", 3)]
)
def test_fused_kernels_equal_the_kernels_that_they_fuse(
    pools: Pools, tmp_path: Path, ranks: int, dtype: str, shapes: int
) -> None:
    """By LL words, and by one-shot with and without rows that are loaded ahead."""
    for result in pools(ranks).run(fuse, str(tmp_path), dtype):
        assert len(result) == 3 * shapes
        assert all(all(equal) for equal in result.values()), result


@pytest.mark.parametrize(
    ("ranks", "dtype", "first_epoch"),
    [(2, "float16", WRAP - 3), (2, "float32", (1 << 31) - 3), (3, "float16", REFRESH - 2)],
)
def test_fused_product_equals_gemv_sum_and_norm(
    pools: Pools, tmp_path: Path, ranks: int, dtype: str, first_epoch: int
) -> None:
    """One row of the weight a program, two, and the tuned tile; among other calls, and where marks change their sign."""
    results = pools(ranks).run(multiply_and_fuse, str(tmp_path), dtype, first_epoch)
    assert all(result == results[0] for result in results)
    assert results[0]["bits"] == [[True, True]] * 6 and not results[0]["failed"]
    assert results[0]["calls"] == [12, 0], "a product is one call of the first channel"


@pytest.mark.parametrize(
    ("kind", "collective"),
    [("words", 1), ("one-shot", 2), ("two-shot", 3), ("fused one-shot", 2), ("gemv", 1), ("barrier", 4)],
)
def test_rank_that_waits_in_vain_gives_up_and_reports(
    pools: Pools, tmp_path: Path, kind: str, collective: int
) -> None:
    first, second = pools(2).run(wait_in_vain, str(tmp_path), kind)
    assert first == {"failed": True, "collective": collective}
    assert collective in COLLECTIVES
    assert second == {"failed": False, "collective": 0}


@pytest.mark.parametrize(
    ("kind", "completed"),
    [("words", 1), ("one-shot", 1), ("two-shot", 0), ("fused one-shot", 1), ("gemv", 1)],
)
def test_rank_that_comes_late_completes_what_was_sent_in_whole_and_times_out(
    pools: Pools, tmp_path: Path, kind: str, completed: int
) -> None:
    """It finds nothing of the later calls that the other rank has run meanwhile, and reports as well."""
    first, second = pools(2).run(come_late, str(tmp_path), kind)
    assert first == [{"right": False, "failed": True}] * 3
    assert second[:completed] == [{"right": True, "failed": False}] * completed
    assert second[completed:] == [{"right": False, "failed": True}] * (3 - completed)


@pytest.mark.parametrize("first_epoch", [1, REFRESH - 7])
def test_exchanged_messages_are_those_of_the_other_rank(
    pools: Pools, tmp_path: Path, first_epoch: int
) -> None:
    """No rank writes the next message before the other one has read the last, and none reads before all rows are there."""
    first, second = pools(2).run(exchange, str(tmp_path), first_epoch)
    assert first == second
    assert first["wrong"] == [] and not first["failed"]
    assert first["calls"][0] > 2 * EXCHANGES and first["calls"][1] == 0


@pytest.mark.parametrize("stale", itertools.product((0, 1), repeat=2))
@pytest.mark.parametrize("late", itertools.product((0, 1), repeat=2))
def test_wait_is_over_only_if_nothing_is_stale_whichever_thread_is_late(
    stale: tuple[int, int], late: tuple[int, int]
) -> None:
    state = torch.zeros(1, dtype=torch.int32)
    wait_state_kernel[(1,)](
        torch.tensor(stale, dtype=torch.int32), torch.tensor(late, dtype=torch.int32), state, count=2
    )
    if not any(stale):
        assert int(state) not in (WAITING.value, TIMED_OUT.value)
    else:
        expired = any(map(all, zip(stale, late, strict=True)))
        assert int(state) == (TIMED_OUT.value if expired else WAITING.value)


@pytest.mark.parametrize("ranks", range(2, MAX_RANKS + 1))
def test_capacities_fit_into_the_allocation(ranks: int) -> None:
    flags = 2 * CHANNELS * MAX_RANKS * 8
    words = 2 * ranks * CHANNELS * SLOT_LINES * 2 * LINE_BYTES
    for two_shot in (False, True):
        capacity = push_capacity(ranks, two_shot=two_shot)
        region = capacity // CHANNELS // (ranks if two_shot else 1)
        assert region % LINE_BYTES == 0
        regions = ranks * (2 if two_shot else 1)
        assert flags + words + 2 * CHANNELS * regions * region <= allocation_bytes(ranks)
    assert low_latency_capacity() == CHANNELS * SLOT_LINES * LINE_BYTES


def test_outputs_of_a_fused_product_are_whole_lines_of_one_channel() -> None:
    assert fits_outputs(2) and fits_outputs(8192)
    assert not fits_outputs(0) and not fits_outputs(5121) and not fits_outputs(8194)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 5120), (5121, 4096), (4096, 1088), (70, 65536)])
def test_prefetch_stays_inside_the_weight(outputs: int, inputs: int, stride: int) -> None:
    weight = torch.empty((outputs, inputs), dtype=torch.bfloat16, device="meta")
    plan = plan_prefetch(weight, weight, nbytes=8 << 20, programs=32, stride=stride)
    lines = plan.programs * plan.rounds * ROUND_LINES
    assert 0 < lines <= (8 << 20) // 128
    last_row = (lines - 1) // plan.options()["ROW_LINES"] * stride
    assert last_row < outputs


def test_nothing_is_prefetched_of_a_weight_that_is_small_or_has_no_whole_cache_lines() -> None:
    whole = torch.empty((1, 64))
    for weight in (None, torch.empty((64, 64)), torch.empty((65536, 40)), torch.empty((8192, 128))[:, :64]):
        plan = plan_prefetch(weight, whole, nbytes=8 << 20, programs=32, stride=2)
        assert plan.programs == 0 and plan.weight is whole


def test_rows_that_fused_kernels_take() -> None:
    assert fits_rows(64, 10240) and fits_rows(128, 10240) and not fits_rows(129, 10240)
    assert not fits_rows(1, 10248), "a row must consist of whole lines"
    assert not fits_rows(1, 2 * SLOT_LINES * LINE_BYTES)
    region = SLOT_BYTES // 2
    assert fits_push_rows(CHANNELS, region, 2) and not fits_push_rows(CHANNELS + 1, region, 2)
    assert not fits_push_rows(1, region, 3) and not fits_push_rows(1, 10248, 2)
