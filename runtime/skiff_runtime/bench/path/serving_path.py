"""The loads of the bench, and what each costs the front processes."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import psutil
import uvloop
from tokenizers import Tokenizer

from skiff_runtime.bench.cpu_time import cpu_seconds
from skiff_runtime.bench.online.results import Figures, distribution
from skiff_runtime.bench.path.frontend_processes import FrontendProcesses
from skiff_runtime.bench.path.load_client import Stream, ask_all, request

IDLE_SECONDS: Final = 2.0
WARM_UP_REQUESTS: Final = 64
CONCURRENCY: Final = 16
"""Of the requests of one token."""
LONG_CONCURRENCY: Final = 2
_WORDS: Final = [
    "pod",
    "node",
    "image",
    "model",
    "token",
    "cache",
    "page",
    "rank",
    "prefill",
    "decode",
    "cluster",
    "service",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """How much of each load is sent. ``step_seconds``: from one token of a stream to the next."""

    requests: int
    prompt_tokens: int
    streams: int
    stream_tokens: int
    long_prompts: int
    long_prompt_tokens: int
    step_seconds: float


class PathBench:
    """Measures one set of running front processes."""

    def __init__(self, fronts: FrontendProcesses, loads: Loads) -> None:
        self._fronts = fronts
        self._loads = loads
        self._name = fronts.launch.config.served_model_name or ""
        self._tokenizer = Tokenizer.from_file(str(fronts.launch.model.tokenizer_path / "tokenizer.json"))
        self._random = random.Random(0)

    def run(self) -> Figures:
        """All loads, one after the other."""
        self._ask([self._request(8, 4)] * WARM_UP_REQUESTS, CONCURRENCY)
        idle = self._cpu(lambda: time.sleep(IDLE_SECONDS))
        figures = {
            "requests": self._requests(idle),
            "streams": self._streams(idle),
            "stall": self._stall(),
        }
        return {**figures, "rss_mib": self._rss()}

    def _requests(self, idle: dict[str, float]) -> Figures:
        """One token each: microseconds a request."""
        loads = self._loads
        texts = [self._request(loads.prompt_tokens, 1) for _ in range(loads.requests)]
        return self._load(texts, CONCURRENCY, idle, per=loads.requests)

    def _streams(self, idle: dict[str, float]) -> Figures:
        """Many streams at a time: microseconds a token, and how old tokens are when the client has them."""
        loads = self._loads
        streams: list[Stream] = []
        texts = [self._request(16, loads.stream_tokens) for _ in range(loads.streams)]
        tokens = loads.streams * loads.stream_tokens
        load = self._load(texts, loads.streams, idle, per=tokens, keep=streams)
        step = loads.step_seconds
        ages = [(moment % step) * 1e3 for each in streams for moment in each.arrivals[1:]]
        return {**load, "tokens_per_second": tokens / load["seconds"], "age_ms": distribution(ages)}

    def _stall(self) -> Figures:
        """Streams run while long prompts come in: how late each token is, over the step."""
        loads = self._loads
        streams = [self._request(16, loads.stream_tokens) for _ in range(loads.streams)]
        long = [self._request(loads.long_prompt_tokens, 1) for _ in range(loads.long_prompts)]

        async def both() -> list[Stream]:
            running = asyncio.create_task(self._send(streams, loads.streams))
            await asyncio.sleep(loads.step_seconds * loads.stream_tokens / 10)
            await self._send(long, LONG_CONCURRENCY)
            return await running

        gaps = np.concatenate([np.diff(each.arrivals) for each in uvloop.run(both())])
        late = np.maximum(0.0, gaps - loads.step_seconds) * 1e3
        return {"long_prompts": loads.long_prompts, "late_ms": distribution(late.tolist())}

    def _load(
        self,
        requests: Sequence[bytes],
        concurrency: int,
        idle: dict[str, float],
        *,
        per: int,
        keep: list[Stream] | None = None,
    ) -> Figures:
        """Send; CPU-microseconds of each process, idle use taken off, over ``per``."""
        streams: list[Stream] = [] if keep is None else keep
        began = time.perf_counter()
        used = self._cpu(lambda: streams.extend(self._ask(requests, concurrency)))
        seconds = time.perf_counter() - began
        cost = {
            name: (value - idle[name] * seconds / IDLE_SECONDS) / per * 1e6 for name, value in used.items()
        }
        return {"count": per, "seconds": seconds, "us": cost, "us_together": sum(cost.values())}

    def _cpu(self, work: Callable[[], object]) -> dict[str, float]:
        before = cpu_seconds(self._fronts.watched)
        work()
        after = cpu_seconds(self._fronts.watched)
        return {name: after[name] - before[name] for name in before}

    def _rss(self) -> dict[str, float]:
        return {
            each.name: psutil.Process(each.handle.pid).memory_info().rss / 2**20
            for each in self._fronts.watched
        }

    def _ask(self, requests: Sequence[bytes], concurrency: int) -> list[Stream]:
        return uvloop.run(self._send(requests, concurrency))

    async def _send(self, requests: Sequence[bytes], concurrency: int) -> list[Stream]:
        return await ask_all(self._fronts.url, requests, concurrency=concurrency)

    def _request(self, prompt_tokens: int, tokens: int) -> bytes:
        return request(self._fronts.url, self._name, self._text(prompt_tokens), tokens=tokens)

    def _text(self, tokens: int) -> str:
        """Words of about so many tokens."""
        words = self._random.choices(_WORDS, k=tokens)
        ids = self._tokenizer.encode(" ".join(words), add_special_tokens=False).ids
        return " ".join(words[: max(1, tokens * len(words) // len(ids))])
