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
    tp_size: int,
    run_dir: Path,
    function: RankFunction,
    *arguments: Any,
    device: str = "cpu",
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> list[Any]:
    """Run ``function(group, *arguments)`` on ``tp_size`` ranks; return the ranks' results, passed as JSON.

    With device ``cuda`` rank i is on GPU i.

    ``function`` must be importable by name. Raises RuntimeError when a rank fails or takes too long.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run, args=(rank, tp_size, run_dir, device, function, arguments))
        for rank in range(tp_size)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout_seconds)
        if any(process.exitcode != 0 for process in processes):
            raise RuntimeError(f"ranks ended with {[process.exitcode for process in processes]}")
    finally:
        for process in processes:
            process.kill()
    return [json.loads(_answer(run_dir, rank).read_text()) for rank in range(tp_size)]


def _run(
    rank: int, tp_size: int, run_dir: Path, device: str, function: RankFunction, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    with TensorParallelGroup.start(
        tp_rank=rank, tp_size=tp_size, device=device, run_dir=run_dir, timeout_seconds=TIMEOUT_SECONDS
    ) as group:
        _answer(run_dir, rank).write_text(json.dumps(function(group, *arguments)))


def _answer(run_dir: Path, rank: int) -> Path:
    return run_dir / f"answer{rank}.json"
