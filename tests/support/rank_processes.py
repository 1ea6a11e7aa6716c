"""Runs functions on every rank of a tensor-parallel group, each in a process of its own."""

import gc
import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self

import torch
from engine_driver import DEVICE

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup

TIMEOUT_SECONDS: Final = 240.0 if DEVICE == "cpu" else 840.0
"""On a GPU a rank may wait for FlashInfer's compilation; both are a minute less than pytest's limit."""

RankFunction = Callable[..., Any]


@dataclass(frozen=True)
class _Rank:
    process: multiprocessing.process.BaseProcess
    connection: Connection


class RankPool:
    """The processes of one group of ranks, which run one function after another.

    The ranks are started by the first call, and again after a function has failed.
    """

    def __init__(self, tp_size: int, directory: Path, device: str = DEVICE) -> None:
        """``directory`` contains the ranks' rendezvous directories, one for each start. On ``cuda``, rank i has GPU i."""
        self._tp_size = tp_size
        self._device = device
        self._directory = directory
        self._starts = 0
        self._ranks: list[_Rank] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self, function: RankFunction, *arguments: Any, timeout_seconds: float = TIMEOUT_SECONDS
    ) -> list[Any]:
        """Run ``function(group, *arguments)`` on every rank; return the ranks' results.

        ``function`` must be importable by name. Raises RuntimeError when a rank fails or takes too long.
        """
        if not self._ranks:
            self._start()
        try:
            for rank in self._ranks:
                rank.connection.send((function, arguments))
            return self._collect(monotonic() + timeout_seconds)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill the ranks."""
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
            rank.connection.close()
        self._ranks = []

    def _start(self) -> None:
        context = _start_context(self._device)
        run_dir = self._directory / f"ranks{self._starts}"
        run_dir.mkdir(parents=True)
        self._starts += 1
        for tp_rank in range(self._tp_size):
            connection, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, tp_rank, self._tp_size, self._device, run_dir), daemon=True
            )
            process.start()
            theirs.close()
            self._ranks.append(_Rank(process, connection))

    def _collect(self, deadline: float) -> list[Any]:
        results: dict[int, Any] = {}
        while len(results) < self._tp_size:
            waiting = {each.connection: rank for rank, each in enumerate(self._ranks) if rank not in results}
            ready = wait(list(waiting), max(0.0, deadline - monotonic()))
            if not ready:
                raise RuntimeError(f"ranks {sorted(waiting.values())} have not answered in time")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting[connection]
                try:
                    failure, results[rank] = connection.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank} has ended") from None
                if failure is not None:
                    raise RuntimeError(f"rank {rank} failed:\n{failure}")
        return [results[rank] for rank in range(self._tp_size)]


Pools = Callable[[int], RankPool]


@contextmanager
def rank_pools(directory: Path, device: str = DEVICE) -> Iterator[Pools]:
    """A pool of each number of ranks that is asked for, whose processes run the functions of several tests."""
    with ExitStack() as stack:
        yield cache(lambda ranks: stack.enter_context(RankPool(ranks, directory / str(ranks), device)))


def on_ranks(
    tp_size: int,
    run_dir: Path,
    function: RankFunction,
    *arguments: Any,
    device: str = DEVICE,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """Run one function on ``tp_size`` ranks, as ``RankPool.run`` does."""
    with RankPool(tp_size, run_dir, device) as pool:
        return pool.run(function, *arguments, timeout_seconds=timeout_seconds)


def _start_context(device: str) -> SpawnContext | ForkServerContext:
    """Return how to start ranks. On a CPU they are forked from a process that has imported what most of them need.

    That process has run nothing, so it has neither threads nor tensors.
    """
    if device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_functions"])
    return context


def single_rank() -> TensorParallelGroup:
    """Return the group of the only rank of ``--tp 1``, in this process."""
    return TensorParallelGroup(device=torch.device("cuda", 0) if DEVICE == "cuda" else None)


def _serve(connection: Connection, rank: int, tp_size: int, device: str, run_dir: Path) -> None:
    """Run the functions that arrive, until the connection ends."""
    torch.set_num_threads(1)
    with TensorParallelGroup.start(
        tp_rank=rank, tp_size=tp_size, device=device, run_dir=run_dir, timeout_seconds=TIMEOUT_SECONDS
    ) as group:
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:
                return
            try:
                connection.send((None, function(group, *arguments)))
            except Exception:  # noqa: BLE001 (reported to the test)
                connection.send((traceback.format_exc(), None))
                return
            gc.collect()
            if group.device.type == "cuda":
                torch.cuda.empty_cache()
