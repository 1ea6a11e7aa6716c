"""Deferred captures without CUDA graphs: tasks in their place that contain a collective, as real captures do.

They overwrite nothing of the engine, so they show the order and the thread of captures, and that all ranks run them at the
same place among their steps: a rank that ran one elsewhere would exchange other tensors than its peers.
"""

import threading
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from serving_engine import Served, serve

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.engine import Engine
from skiff_runtime.engine.graph_captures import CaptureTask, GraphCaptures
from skiff_runtime.messages import GenerateRequest

EARLY: Final = (64, 4, 2, 1)
DEFERRED: Final = (16, 32, 48, 2048)

Captured = list[tuple[int, str]]
"""Size and thread of each capture, in their order."""


def serve_with_captures(
    group: TensorParallelGroup, path: Path, requests: list[GenerateRequest], options: dict[str, Any]
) -> tuple[Served, Captured]:
    """Serve the requests by an engine with deferred captures; ``options`` are keyword arguments of ``serve``."""
    captured: Captured = []
    served = serve(
        path, requests, group=group, defer_captures=True, prepare=partial(_install, captured), **options
    )
    return served, captured


def _install(captured: Captured, engine: Engine) -> None:
    def capture(size: int) -> None:
        group = engine._group
        total = group.all_reduce(torch.full((1,), float(size * (group.tp_rank + 1))))
        assert total.item() == size * sum(range(1, group.tp_size + 1)), "another rank is elsewhere"
        captured.append((size, threading.current_thread().name))

    engine._captures = GraphCaptures(
        [CaptureTask(size, partial(capture, size)) for size in EARLY],
        [CaptureTask(size, partial(capture, size)) for size in DEFERRED],
        has_room=lambda needed: True,
        all_ranks=engine._all_ranks,
    )
