"""Serves a crowd of prompts under given engine settings, with scheduler, engine and channels as in a service."""

import itertools
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from engine_driver import make_config
from pairwise import cover_pairs
from scheduler_bench import Replies, generate
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.engine import Engine
from skiff_runtime.messages import AbortRequest, RankInputs, TokenBatch, ToLeader
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender
from skiff_runtime.models.config import read_model_config
from skiff_runtime.scheduler.scheduler import Scheduler
from skiff_runtime.worker.rank import FollowerChannel, LeaderChannel
from skiff_runtime.worker.step_profiler import StepProfiler

PROMPTS: Final = 40
TOKENS: Final = 24
FAMILIES: Final = ("llama", "qwen2", "qwen3", "mistral", "qwen3_moe")
COVERED: Final = ("llama", "qwen3", "qwen3_moe")
"""The families of the ordinary run; ``make matrix`` takes all."""
MAX_TURNS: Final = 20_000
KV_TOKENS: Final = {1: 192, 16: 192, 64: 256}
"""Tokens of the KV cache by page size: so few that requests evict and preempt each other, though each fits alone."""


@dataclass(frozen=True)
class Setting:
    """One combination of settings."""

    family: str
    cache: str
    tp: int
    overlap: bool
    budget: int
    page_size: int

    def __str__(self) -> str:
        mode = "overlap" if self.overlap else "lockstep"
        return f"{self.family}-{self.cache}-tp{self.tp}-{mode}-budget{self.budget}-page{self.page_size}"


@dataclass(frozen=True)
class Outcome:
    """Greedy tokens by prompt, and sums of the step counters."""

    outputs: list[list[int]]
    preempted: int = 0
    evicted_pages: int = 0
    cached_tokens: int = 0


_VALUES: Final[tuple[tuple[Any, ...], ...]] = (
    FAMILIES,
    ("radix", "naive"),
    (1, 2),
    (True, False),
    (16, 1024),
    tuple(KV_TOKENS),
)


def product() -> list[Setting]:
    """Return every combination of settings."""
    return [Setting(*values) for values in itertools.product(*_VALUES)]


def covering() -> list[Setting]:
    """Return a few settings that contain every pair of values of any two options, of families those of ``COVERED``."""
    return [Setting(*values) for values in cover_pairs(COVERED, *_VALUES[1:])]


def prompts(seed: int) -> list[list[int]]:
    """Return prompts of 1 to about 100 tokens: stems cut anywhere or at page ends, many with a tail of their own."""
    random = np.random.default_rng(seed)
    stems = [random.integers(2, VOCAB_SIZE, 80).tolist() for _ in range(4)]
    crowd = []
    for number in range(PROMPTS):
        stem = stems[
            number * len(stems) // PROMPTS
        ]  # neighbours share a stem, so that some matches survive evictions
        cut = int(random.choice([16, 32, 64, 80])) if number % 3 == 0 else int(random.integers(1, 80))
        tail = int(random.integers(0, 24)) if number % 4 else 0
        crowd.append(stem[:cut] + random.integers(2, VOCAB_SIZE, tail).tolist())
    return crowd


class Frontend(LeaderChannel):
    """Rank 0's channel with simulated clients at its other end; it stops when all of them are served."""

    def __init__(self, endpoints: Endpoints, tp_size: int, crowd: list[list[int]], engine: Engine) -> None:
        super().__init__(
            Receiver(endpoints.rank(0), ToLeader),
            endpoints,
            tp_size,
            should_stop=lambda: self._done,
            profiler=StepProfiler(),
            load_grammar=engine.load_grammar,
        )
        self._requests = Sender(endpoints.rank(0))
        self._waiting = list(enumerate(crowd))
        self._done = False
        self.replies = Replies()
        self.counters: Counter[str] = Counter()
        self._send_next(len(crowd) // 2)

    def send(self, batch: TokenBatch) -> None:
        """Take a step's replies, and send one more request; stop after the last reply."""
        self.replies.take(batch)
        self.counters["preempted"] += batch.stats.preempted
        self.counters["evicted_pages"] += batch.stats.evicted_pages
        self.counters["cached_tokens"] += sum(opened.cached_tokens for opened in batch.opened)
        self._send_next(1)
        if (
            not self._done
            and len(self.replies) == PROMPTS
            and all(r.has_ended for r in self.replies.values())
        ):
            self._done = True
            self._requests.send(AbortRequest(uid=-1))  # wakes the loop, which is idle now

    def outcome(self) -> Outcome:
        outputs = [self.replies[uid].tokens for uid in range(PROMPTS)]
        return Outcome(outputs=outputs, **self.counters)

    def _send_next(self, count: int) -> None:
        arriving, self._waiting = self._waiting[:count], self._waiting[count:]
        for uid, prompt in arriving:
            self._requests.send(generate(uid, prompt, max_tokens=TOKENS))


def serve(
    group: TensorParallelGroup, setting: Setting, path: Path, crowd: list[list[int]], run_dir: Path
) -> Outcome | None:
    """Serve the whole crowd on this rank; return the outcome on rank 0, None on the others.

    ``run_dir`` is the ranks' rendezvous directory; it must be new.
    """
    run_dir.mkdir(exist_ok=True)
    config = make_config(
        path,
        max_model_len=160,
        max_running_requests=16,
        max_num_batched_tokens=setting.budget,
        disable_overlap_schedule=not setting.overlap,
        page_size=setting.page_size,
        max_total_tokens=KV_TOKENS[setting.page_size],
        disable_radix_cache=setting.cache == "naive",
        tp_size=setting.tp,
    )
    model = read_model_config(path, max_model_len=config.max_model_len)
    engine = Engine(config, model, group, on_phase=lambda phase, progress: None)
    endpoints = Endpoints(run_dir)
    front = Frontend(endpoints, group.tp_size, crowd, engine) if group.tp_rank == 0 else None
    channel = front or FollowerChannel(
        Receiver(endpoints.rank(group.tp_rank), RankInputs),
        beat=lambda: None,
        load_grammar=engine.load_grammar,
    )
    scheduler = Scheduler(
        config, eos_token_ids=(), num_pages=engine.num_pages, engine=engine, channel=channel
    )
    try:
        turns = 0
        while scheduler.turn():
            scheduler.check()
            turns += 1
            assert turns < MAX_TURNS, "the requests do not end"
    finally:
        engine.close()
    return front.outcome() if front else None


def serve_all(
    group: TensorParallelGroup,
    settings: list[dict[str, Any]],
    models: str,
    crowd: list[list[int]],
    run_dir: str,
) -> list[dict[str, Any]]:
    """Serve under all settings, one after another, on the ranks of ``group``; rank 0 returns the outcomes."""
    outcomes = []
    for number, fields in enumerate(settings):
        setting = Setting(**fields)
        outcome = serve(group, setting, Path(models) / setting.family, crowd, Path(run_dir) / str(number))
        outcomes.append(asdict(outcome) if outcome else {})
    return outcomes
