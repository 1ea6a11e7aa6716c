"""Runs a function on every rank of a tensor-parallel group, each in a process of its own."""

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup

TIMEOUT_SECONDS: Final = 120.0

RankFunction = Callable[..., Any]


def on_ranks(
    size: int,
    run_dir: Path,
    function: RankFunction,
    *arguments: Any,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """``function(group, *arguments)`` on ``size`` ranks; what each returned, through JSON.

    ``function`` must be importable by name. Raises RuntimeError when a rank fails or takes too long.
    """
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_run, args=(rank, size, run_dir, function, arguments)) for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout_seconds)
        if any(process.exitcode != 0 for process in ranks):
            raise RuntimeError(f"ranks ended with {[process.exitcode for process in ranks]}")
    finally:
        for process in ranks:
            process.kill()
    return [json.loads(_answer(run_dir, rank).read_text()) for rank in range(size)]


def _run(rank: int, size: int, run_dir: Path, function: RankFunction, arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    with TensorParallelGroup.start(
        rank=rank, size=size, device="cpu", run_dir=run_dir, timeout_seconds=TIMEOUT_SECONDS
    ) as group:
        _answer(run_dir, rank).write_text(json.dumps(function(group, *arguments)))


def _answer(run_dir: Path, rank: int) -> Path:
    return run_dir / f"answer{rank}.json"
