"""Serves requests by scheduler and engine without other processes, alone or as one rank of several in lockstep."""

import gc
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from unittest import mock

from engine_driver import make_config, make_engine
from scheduler_bench import MemoryChannel, Replies
from tiny_tokenizer import EOS_ID

from skiff_runtime.config import Config
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.engine import Engine
from skiff_runtime.messages import AbortRequest, FlushCache, GenerateRequest, LoadAdapter, TokenBatch
from skiff_runtime.processes.launch import StartAdapter
from skiff_runtime.scheduler import admission
from skiff_runtime.scheduler.scheduler import Scheduler
from skiff_runtime.step import StepHandle, StepPlan
from skiff_runtime.worker.adapter_reader import AdapterReader

FLUSH: Final = -2


@dataclass
class Served:
    """Replies, rows (starts and lengths) of each step, sums of counters, pages that were not freed, and the checksum."""

    replies: Replies = field(default_factory=Replies)
    steps: list[tuple[list[int], list[int]]] = field(default_factory=list)
    preempted: int = 0
    hit_tokens: int = 0
    lost_pages: int = -1
    checksum: int = 0
    graphs_pending: list[int] = field(default_factory=list)
    """CUDA graphs that were not captured yet, after each step."""

    def take(self, batch: TokenBatch) -> None:
        self.replies.take(batch)
        self.preempted += batch.stats.preempted
        self.hit_tokens += batch.stats.hit_tokens
        self.graphs_pending.append(batch.stats.graphs_pending)
        self.lost_pages = batch.stats.pages_total - batch.stats.pages_free


class _RecordingEngine:
    """Passes steps to an engine and records their rows."""

    def __init__(self, engine: Any, served: Served) -> None:
        self._engine = engine
        self._served = served

    def launch(self, plan: StepPlan) -> StepHandle:
        self._served.steps.append((plan.starts.tolist(), plan.lengths.tolist()))
        handle: StepHandle = self._engine.launch(plan)
        return handle


def serve(
    path: Path,
    requests: Sequence[GenerateRequest],
    *,
    group: TensorParallelGroup | None = None,
    aborted: Collection[int] = (),
    new_token_ratio: float = admission.INITIAL_NEW_TOKEN_RATIO,
    defer_captures: bool = False,
    prepare: Callable[[Engine], None] = lambda engine: None,
    adapters: Sequence[Path] = (),
    **changes: Any,
) -> Served:
    """Serve requests that arrive at once; abort the ``aborted`` in the turn after their first token; flush the cache.

    A small ``new_token_ratio`` admits more requests than there is memory for, so that some are preempted. ``prepare`` is
    called before the warm-up, after which ``defer_captures`` leaves graphs to be captured. ``adapters`` are the directories of
    LoRA adapters, with ids from 1 on.
    """
    if group is not None:
        changes["tp_size"] = group.tp_size
    changes = {**changes, "enable_lora": True} if adapters else changes
    config = make_config(path, **{"log_level": "debug", **changes})
    engine = make_engine(path, group, **changes)
    prepare(engine)
    engine.warmup(defer_captures=defer_captures)
    try:
        with mock.patch.object(admission, "INITIAL_NEW_TOKEN_RATIO", new_token_ratio):
            return _serve(config, engine, requests, aborted, adapters)
    finally:
        engine.close()


def _serve(
    config: Config,
    engine: Engine,
    requests: Sequence[GenerateRequest],
    aborted: Collection[int],
    adapters: Sequence[Path],
) -> Served:
    served, channel, left = Served(), MemoryChannel(), list(aborted)
    started = [StartAdapter(number, str(number), "", str(each)) for number, each in enumerate(adapters, 1)]
    reader = AdapterReader(engine)
    reader.preload(started, config.max_cpu_loras or config.max_loras)
    scheduler = Scheduler(
        config,
        eos_token_ids=(EOS_ID,),
        num_pages=engine.num_pages,
        engine=_RecordingEngine(engine, served),
        channel=channel,
        num_deferred_graphs=engine.num_deferred_graphs,
        adapter_store=reader,
        adapters=[LoadAdapter(-3, each.adapter_id, each.name, each.path) for each in started],
    )
    channel.arriving.extend(requests)
    while channel.arriving or not scheduler.is_idle:
        scheduler.turn()
        channel.arriving.extend(reader.take_finished())
        while channel.sent:
            served.take(channel.sent.popleft())
        due = [uid for uid in left if uid in served.replies and served.replies[uid].tokens]
        left = [uid for uid in left if uid not in due]
        channel.arriving.extend(AbortRequest(uid) for uid in due)
    channel.arriving.append(FlushCache(FLUSH))
    scheduler.turn()
    served.take(channel.sent.popleft())
    scheduler.check()
    reader.close()
    served.checksum = scheduler.checksum
    return served


def serve_on_rank(
    group: TensorParallelGroup, path: Path, requests: list[GenerateRequest], runs: list[dict[str, Any]]
) -> list[Served]:
    """Serve the requests on this rank once for each of ``runs``, which are keyword arguments of ``serve``."""
    outcomes = []
    for options in runs:
        outcomes.append(serve(path, requests, group=group, **options))
        gc.collect()  # frees the engine's memory, before the next one is made
    return outcomes
