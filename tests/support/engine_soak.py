"""Serves many requests by one scheduler and engine in this process, and measures memory and pages afterwards."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
from engine_driver import make_config
from scheduler_bench import request

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.engine import Engine
from skiff_runtime.messages import (
    AbortRequest,
    FinishReason,
    FlushCache,
    GenerateRequest,
    SamplingSpec,
    TokenBatch,
    Wire,
)
from skiff_runtime.models.config import read_model_config
from skiff_runtime.scheduler.channel import Channel, SchedulerInput
from skiff_runtime.scheduler.scheduler import Scheduler

MIB: Final = 1 << 20
AHEAD: Final = 512
"""Bound of requests in flight."""
FLUSH: Final = -2
KINDS: Final[tuple[dict[str, Any], ...]] = (
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 40, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.9, "logit_bias": ((7, 2.0),), "logprobs": 2},
)


@dataclass(frozen=True)
class Memory:
    """MiB that are resident in this process, and that torch has allocated and reserved on the GPU (0 without one)."""

    resident: float
    allocated: float
    reserved: float

    @staticmethod
    def now() -> "Memory":
        on_gpu = torch.cuda.is_available()
        return Memory(
            psutil.Process().memory_info().rss / MIB,
            torch.cuda.memory_allocated() / MIB if on_gpu else 0.0,
            torch.cuda.memory_reserved() / MIB if on_gpu else 0.0,
        )


@dataclass
class Ledger:
    """Counters of replies; it holds nothing per finished request, so it does not grow."""

    running: dict[int, int] = field(default_factory=dict)
    """Remaining tokens of each running request, by uid."""
    ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    evicted: int = 0
    preempted: int = 0
    hits: int = 0
    flushed: tuple[int, int, int] | None = None
    """(All pages, free ones, cached ones) after the cache was flushed."""

    def take(self, batch: TokenBatch) -> None:
        """Count a step's replies; a request must not get more tokens than it may, nor end twice."""
        assert not batch.failed, batch.failed
        rows = zip(
            np.frombuffer(batch.uids, Wire.UID).tolist(),
            np.frombuffer(batch.tokens, Wire.TOKEN).tolist(),
            np.frombuffer(batch.finishes, Wire.FINISH).tolist(),
            strict=True,
        )
        for uid, token, finish in rows:
            if token >= 0:
                self.tokens += 1
                self.running[uid] -= 1
                assert self.running[uid] >= 0, f"{uid} got more tokens than it asked for"
            if finish:
                left = self.running.pop(uid)
                assert left == 0 or finish == FinishReason.ABORT, f"{uid} ended {left} tokens early"
                self.ended[FinishReason(finish).name] += 1
        stats = batch.stats
        self.evicted += stats.evicted_pages
        self.preempted += stats.preempted
        self.hits += stats.hit_tokens
        if batch.flushed:
            self.flushed = stats.pages_total, stats.pages_free, stats.pages_cached


class Crowd(Channel):
    """Sends requests, one in ``ABORTED`` of which is aborted; some share a prefix of their prompts."""

    ABORTED: Final = 50

    def __init__(self, vocab_size: int, *, longest: int, outputs: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._longest = longest
        self._outputs = outputs
        self._random = np.random.default_rng(seed)
        self._shared = self._random.integers(2, vocab_size, (8, longest), dtype=np.int32)
        self._leaving: list[tuple[int, int]] = []
        """(Request to abort, number of requests that must have been sent before)."""
        self.num_sent = 0
        self.num_requests = 0
        self.flush = False
        self.ledger = Ledger()

    def receive(self, *, wait: bool, checksum: int) -> list[SchedulerInput]:
        due = [uid for uid, after in self._leaving if after <= self.num_sent]
        self._leaving = [each for each in self._leaving if each[1] > self.num_sent]
        items: list[SchedulerInput] = [AbortRequest(uid=uid) for uid in due if uid in self.ledger.running]
        while self.num_sent < self.num_requests and len(self.ledger.running) < AHEAD:
            items.append(self._request(self.num_sent))
            self.num_sent += 1
        if self.flush:
            items.append(FlushCache(uid=FLUSH))
            self.flush = False
        return items

    def send(self, batch: TokenBatch) -> None:
        self.ledger.take(batch)

    def _request(self, uid: int) -> GenerateRequest:
        random = self._random
        length, count = int(random.integers(1, self._longest)), int(random.integers(1, self._outputs))
        prompt = random.integers(2, self._vocab_size, length, dtype=np.int32)
        if uid % 3 == 0:
            known = int(random.integers(0, length))
            prompt[:known] = self._shared[int(random.integers(0, len(self._shared))), :known]
        if uid % self.ABORTED == 0:
            self._leaving.append((uid, uid + int(random.integers(1, AHEAD))))
        self.ledger.running[uid] = count
        sampling = SamplingSpec(max_tokens=count, seed=uid, ignore_eos=True, **KINDS[uid % len(KINDS)])
        return request(uid, prompt, sampling)


@dataclass(frozen=True)
class Outcome:
    """The counters, memory after a tenth of the requests and after all of them, and the lockstep checksum."""

    ledger: Ledger
    early: Memory
    late: Memory
    checksum: int


def soak(
    path: Path,
    count: int,
    *,
    group: TensorParallelGroup,
    longest: int,
    outputs: int,
    seed: int,
    **changes: Any,
) -> Outcome:
    """Serve ``count`` requests of at most ``longest`` prompt and ``outputs`` output tokens, on this rank of ``group``.

    ``changes`` are fields of ``Config``.
    """
    config = make_config(path, tp_size=group.tp_size, **changes)
    model = read_model_config(path, max_model_len=config.max_model_len)
    engine = Engine(config, model, group, on_phase=lambda phase, progress: None)
    engine.warmup()
    crowd = Crowd(model.vocab_size, longest=longest, outputs=outputs, seed=seed)
    scheduler = Scheduler(config, eos_token_ids=(), num_pages=engine.num_pages, engine=engine, channel=crowd)
    early, late = (_serve(scheduler, crowd, total) for total in (count // 10, count))
    engine.close()
    return Outcome(crowd.ledger, early, late, scheduler.checksum)


def _serve(scheduler: Scheduler, crowd: Crowd, num_requests: int) -> Memory:
    """Serve until ``num_requests`` requests have ended, flush the cache, and return the memory in use."""
    crowd.num_requests = num_requests
    while crowd.num_sent < num_requests or not scheduler.is_idle:
        scheduler.turn()
    crowd.flush, crowd.ledger.flushed = True, None
    while crowd.ledger.flushed is None:
        scheduler.turn()
    scheduler.check()
    return Memory.now()
