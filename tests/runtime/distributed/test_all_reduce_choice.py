"""Which algorithm sums a message, the fallback to NCCL, and the refusal of --all-reduce p2p."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="builds of torch for CPUs may come without Triton")

from skiff_runtime.config import Config
from skiff_runtime.distributed import all_reduce, symmetric_memory
from skiff_runtime.distributed.all_reduce import (
    Algorithm,
    PeerMemoryUnavailable,
    PeerToPeerAllReduce,
    choose_algorithm,
    make_peer_memory,
)
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.errors import CollectiveTimeout, ConfigError
from skiff_runtime.kernels.tuning import HOPPER, AllReduceLimits
from skiff_runtime.processes.resolve import resolve

OF_TWO_RANKS = AllReduceLimits(
    ranks=2,
    low_latency=1 << 10,
    fused_low_latency=1 << 10,
    one_shot=1 << 20,
    fused_one_shot=512 << 10,
    two_shot=1 << 20,
)
LIMITS = (
    OF_TWO_RANKS,
    replace(OF_TWO_RANKS, ranks=4, one_shot=2 << 10, fused_one_shot=2 << 10, two_shot=4 << 10),
)


@pytest.mark.parametrize(
    ("nbytes", "ranks", "expected"),
    [
        (16, 2, Algorithm.LOW_LATENCY),
        (1 << 10, 2, Algorithm.LOW_LATENCY),
        ((1 << 10) + 16, 2, Algorithm.ONE_SHOT),
        (1 << 20, 2, Algorithm.ONE_SHOT),
        ((1 << 20) + 16, 2, Algorithm.NCCL),
        (3 << 10, 4, Algorithm.TWO_SHOT),
        (3 << 10, 3, Algorithm.TWO_SHOT),
        ((4 << 10) + 16, 4, Algorithm.NCCL),
        (16, 5, Algorithm.NCCL),
        (0, 2, Algorithm.NCCL),
        (24, 2, Algorithm.NCCL),
    ],
)
def test_algorithm_depends_on_the_size_and_the_number_of_ranks(
    nbytes: int, ranks: int, expected: Algorithm
) -> None:
    assert choose_algorithm(nbytes, ranks, LIMITS) is expected


def test_limits_of_the_tuning_table_ascend() -> None:
    assert [each.ranks for each in HOPPER.all_reduce] == [2, 4, 8]
    for each in HOPPER.all_reduce:
        assert (
            0
            <= each.fused_low_latency
            <= each.low_latency
            <= each.fused_one_shot
            <= each.one_shot
            <= each.two_shot
        )


def test_integers_are_left_to_nccl() -> None:
    peers = PeerToPeerAllReduce.detached(2, torch.device("cpu"))
    assert peers.can_reduce(torch.empty(64)) and not peers.can_reduce(torch.empty(64, dtype=torch.int64))
    assert peers.can_fuse(torch.empty(3, 64)) and not peers.can_fuse(torch.empty(3, 63))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(1, Algorithm.LOW_LATENCY), (2, Algorithm.ONE_SHOT), (4, Algorithm.ONE_SHOT), (5, None)],
)
def test_norm_is_fused_with_sums_up_to_limits_of_its_own(rows: int, expected: Algorithm | None) -> None:
    peers = PeerToPeerAllReduce.detached(4, torch.device("cpu"))
    peers._limits = (replace(LIMITS[1], low_latency=2 << 10, fused_low_latency=512),)
    x = torch.empty(rows, 256, dtype=torch.bfloat16)
    assert peers._choose_fused(x) is expected
    assert peers.can_fuse(x) is (expected is not None)


class FakeExchange:
    """Memory for messages of up to 4 MiB."""

    capacity = 4 << 20


@pytest.mark.parametrize(
    ("nbytes", "dtype", "exchanged"),
    [
        (1 << 20, torch.bfloat16, False),
        ((1 << 20) + 16, torch.bfloat16, True),
        ((1 << 20) + 8, torch.bfloat16, False),
        (4 << 20, torch.float32, True),
        ((4 << 20) + 16, torch.float32, False),
        (2 << 20, torch.int64, False),
    ],
)
def test_copy_engines_take_what_kernels_do_not_and_their_memory_holds(
    nbytes: int, dtype: torch.dtype, exchanged: bool
) -> None:
    peers = PeerToPeerAllReduce.detached(2, torch.device("cpu"))
    peers._limits = LIMITS
    group = TensorParallelGroup(0, 2, torch.device("cuda", 0))
    assert not group.can_exchange(nbytes, dtype)
    group._peers = peers
    assert not group.can_exchange(nbytes, dtype)
    peers._exchange = FakeExchange()  # type: ignore[assignment]
    assert group.can_exchange(nbytes, dtype) is exchanged
    x = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
    assert (peers.choose(x) is Algorithm.COPY_ENGINES) is exchanged
    assert not peers.can_fuse(x[None]) or not exchanged


@pytest.mark.parametrize(
    ("ranks", "nbytes", "allocated"),
    [(2, 1 << 20, 0), (2, 3 << 20, 3 << 20), (2, 1 << 40, HOPPER.copy_exchange.max_bytes), (4, 3 << 20, 0)],
)
def test_memory_for_exchanges_is_bounded_and_allocated_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, ranks: int, nbytes: int, allocated: int
) -> None:
    sizes: list[int] = []

    def allocate(size: int, _: torch.device) -> torch.Tensor:
        sizes.append(size)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(all_reduce, "allocate", allocate)
    peers = PeerToPeerAllReduce.detached(ranks, torch.device("cpu"))
    peers._limits = LIMITS
    if allocated:
        with pytest.raises(PeerMemoryUnavailable, match="out of memory"):
            peers.allocate_exchange(nbytes, votes())
    else:
        peers.allocate_exchange(nbytes, votes())
    assert sizes == ([allocated] if allocated else [])


def test_ranks_without_memory_for_exchanges_sum_by_nccl_and_say_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    TensorParallelGroup(0, 2).allocate_exchange(1 << 30)  # without peer access there is nothing to do
    group = TensorParallelGroup(0, 2)
    group._peers = PeerToPeerAllReduce.detached(2, torch.device("cpu"))
    monkeypatch.setattr(group, "all_reduce_min", lambda value: value)
    monkeypatch.setattr(all_reduce, "allocate", lambda *_: None)

    def map_peers(_: torch.Tensor) -> Any:
        raise RuntimeError("no more mappings")

    monkeypatch.setattr(all_reduce, "map_peers", map_peers)
    with caplog.at_level("INFO", logger="skiff"):
        group.allocate_exchange(64 << 20)
    assert [each.getMessage() for each in caplog.records] == [
        'large_all_reduce_by_nccl reason="no more mappings"'
    ]
    assert not group.can_exchange(64 << 20, torch.bfloat16)
    group._requires_peers = True
    with pytest.raises(ConfigError, match="--all-reduce p2p: no more mappings; use a smaller --max-num"):
        group.allocate_exchange(64 << 20)


def test_memory_for_exchanges_is_kept_while_it_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "allocate", lambda *_: pytest.fail("there is enough"))
    peers = PeerToPeerAllReduce.detached(2, torch.device("cpu"))
    peers._limits = LIMITS
    peers._exchange = FakeExchange()  # type: ignore[assignment]
    peers.allocate_exchange(FakeExchange.capacity, votes())
    assert isinstance(peers._exchange, FakeExchange)


@pytest.mark.parametrize(
    ("rows", "width", "fused"),
    [
        (8, 32, True),
        (9, 32, True),
        (4096, 32, True),
        (4097, 32, False),
        (1, 64 << 10, True),
        (1, 66 << 10, False),
    ],
)
def test_sum_is_fused_with_the_norm_up_to_a_limit_of_its_own(rows: int, width: int, fused: bool) -> None:
    """Also a row as long as a channel's region, half of its plain buffer, and none that is longer."""
    peers = PeerToPeerAllReduce.detached(2, torch.device("cpu"))
    peers._limits = LIMITS
    assert peers.can_fuse(torch.empty(rows, width)) is fused


def votes(*others: bool) -> Callable[[bool], bool]:
    """Return a vote in which another rank has these opinions, one after the other."""
    opinions = iter(others)
    return lambda fine: fine and next(opinions)


def test_rank_without_peer_access_names_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, peer: (own, peer) != (1, 2))
    with pytest.raises(PeerMemoryUnavailable, match="GPU 1 has no peer access to GPU 2"):
        PeerToPeerAllReduce.connect(1, 4, torch.device("cuda", 1), all_ranks=votes(), timeout_seconds=1)


def test_failed_allocation_is_the_reason_on_the_rank_and_a_hint_on_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)

    def fail(*_: object) -> Any:
        raise RuntimeError("CUDA error: out of memory\nand much more")

    def map_peers(_: torch.Tensor) -> Any:
        pytest.fail("no rank may wait for the others, one of which has no memory")

    monkeypatch.setattr(all_reduce, "allocate", fail)
    monkeypatch.setattr(all_reduce, "map_peers", map_peers)
    with pytest.raises(PeerMemoryUnavailable, match=r"^CUDA error: out of memory$"):
        PeerToPeerAllReduce.connect(0, 2, torch.device("cuda", 0), all_ranks=votes(True), timeout_seconds=1)
    monkeypatch.setattr(all_reduce, "allocate", lambda *_: None)
    with pytest.raises(PeerMemoryUnavailable, match="another rank"):
        PeerToPeerAllReduce.connect(
            0, 2, torch.device("cuda", 0), all_ranks=votes(True, False), timeout_seconds=1
        )


def test_failed_mapping_is_agreed_on_after_the_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)

    def fail(*_: object) -> Any:
        raise RuntimeError

    monkeypatch.setattr(all_reduce, "allocate", lambda *_: None)
    monkeypatch.setattr(all_reduce, "map_peers", fail)
    with pytest.raises(PeerMemoryUnavailable, match="RuntimeError"):
        PeerToPeerAllReduce.connect(
            0, 2, torch.device("cuda", 0), all_ranks=votes(True, True), timeout_seconds=1
        )
    monkeypatch.setattr(all_reduce, "map_peers", lambda *_: None)
    with pytest.raises(PeerMemoryUnavailable, match="another rank"):
        PeerToPeerAllReduce.connect(
            0, 2, torch.device("cuda", 0), all_ranks=votes(True, True, False), timeout_seconds=1
        )


def test_memory_that_does_not_begin_at_its_mapping_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may allocate from a pool, whose bases are what the peers map."""
    memory = torch.zeros(64, dtype=torch.uint8)
    handle = SimpleNamespace(buffer_ptrs=[7, memory.data_ptr()])
    monkeypatch.setattr(
        symmetric_memory, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=()), get_rank=lambda: 1)
    )
    monkeypatch.setattr(symmetric_memory, "_symmetric_memory", SimpleNamespace(rendezvous=lambda *_: handle))
    assert symmetric_memory.map_peers(memory).addresses == (7, memory.data_ptr())
    with pytest.raises(RuntimeError, match="lies 32 bytes behind the base"):
        symmetric_memory.map_peers(memory[32:])


def test_new_memory_has_its_limit() -> None:
    """A limit of 0 would let each wait before ``set_timeout`` fail at once."""
    memory = make_peer_memory((0, 0), 0, 0, torch.device("cpu"), timeout=5)
    assert memory.control.tolist() == [0, 5]


def test_no_message_samples_an_algorithm_without_limits() -> None:
    peers = PeerToPeerAllReduce.detached(4, torch.device("cpu"))
    peers._limits = LIMITS
    assert peers.sample_sizes() == [1 << 10, 2 << 10, 4 << 10]
    assert peers.sample_row_counts(128) == [8, 16] and peers.sample_row_counts(2 << 10) == [1]
    peers._limits = LIMITS[:1]
    assert peers.sample_sizes() == [] and peers.sample_row_counts(128) == []


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(PeerMemoryUnavailable, match="at most 8 ranks"):
        PeerToPeerAllReduce.connect(0, 9, torch.device("cuda", 0), all_ranks=votes(), timeout_seconds=1)


def test_fallback_is_logged_and_refused_where_p2p_is_required(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def connect(*_: object, **__: object) -> Any:
        raise PeerMemoryUnavailable("GPU 0 has no peer access to GPU 1")

    monkeypatch.setattr(PeerToPeerAllReduce, "connect", connect)
    group = TensorParallelGroup(0, 2)
    with caplog.at_level("INFO", logger="skiff"):
        group._connect_peers(1.0, required=False)
    [record] = caplog.records
    assert record.getMessage() == 'all_reduce_by_nccl reason="GPU 0 has no peer access to GPU 1"'
    with pytest.raises(ConfigError, match="--all-reduce p2p: GPU 0 has no peer access to GPU 1"):
        group._connect_peers(1.0, required=True)


def test_timeout_names_the_collective() -> None:
    peers = PeerToPeerAllReduce.detached(2, torch.device("cpu"))
    status = peers._status.zero_()
    peers.set_timeout(15.0)
    assert peers._memory.control[1] == 15_000_000_000
    peers.check()
    status[0] = 3
    with pytest.raises(CollectiveTimeout, match=r"two-shot all-reduce: this rank waited .* longer than 15 s"):
        peers.check()


@pytest.mark.parametrize("backend", ["nccl", "p2p"])
def test_option_that_could_have_no_effect_is_refused(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=f"--all-reduce {backend} is for GPUs"):
        resolve(Config(all_reduce=backend, device="cpu", tp_size=2))
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia0")]))
    with pytest.raises(ConfigError, match=f"--all-reduce {backend} needs several ranks"):
        resolve(Config(all_reduce=backend, device="cuda"))
