"""A scheduler over the simulated engine, run turn by turn, with a record of every reply."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from msgspec.structs import replace
from simulated_engine import VOCAB, SimulatedEngine, cells

from skiff_runtime.config import Config
from skiff_runtime.kvcache.radix import RadixCache
from skiff_runtime.messages import (
    NO_TOKEN,
    AdapterLoaded,
    AdapterRead,
    AdapterRefused,
    CompiledGrammar,
    FinishReason,
    Flushed,
    GenerateRequest,
    LoadAdapter,
    RequestFailed,
    SamplingSpec,
    StepStats,
    StreamOpened,
    TextOptions,
    TokenBatch,
    Wire,
)
from skiff_runtime.scheduler.channel import Channel, SchedulerInput
from skiff_runtime.scheduler.scheduler import NO_ERRORS, Scheduler
from skiff_runtime.step import Int32

EOS: Final = VOCAB - 1
MAX_TURNS: Final = 20_000


def request(
    uid: int,
    prompt: Sequence[int] | Int32,
    sampling: SamplingSpec,
    grammar: CompiledGrammar | None = None,
    priority: int = 0,
    adapter_id: int = 0,
) -> GenerateRequest:
    """Make a request of token ids, as a tokenizer sends it."""
    token_ids = np.array(prompt, Wire.TOKEN).tobytes()
    return GenerateRequest(
        uid, token_ids, sampling, TextOptions(), priority=priority, grammar=grammar, adapter_id=adapter_id
    )


def generate(
    uid: int,
    prompt: Sequence[int],
    *,
    priority: int = 0,
    grammar: CompiledGrammar | None = None,
    adapter_id: int = 0,
    **sampling: Any,
) -> GenerateRequest:
    """Make a greedy request for 4 tokens; ``sampling`` are fields of ``SamplingSpec`` that differ from that."""
    defaults = {"max_tokens": 4, "seed": 0, "temperature": 0.0, "ignore_eos": True}
    return request(uid, prompt, SamplingSpec(**{**defaults, **sampling}), grammar, priority, adapter_id)


ReceivedLogprobs = tuple[int, float, list[int], list[float]]
"""A token, its log-probability, the top tokens and their log-probabilities."""
UNPREDICTED: Final[tuple[float, list[int], list[float]]] = (1.0, [], [])
"""The log-probabilities of a prompt's first token: a NaN would not equal itself."""


@dataclass
class Reply:
    """Everything that one client received."""

    opened: StreamOpened | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[ReceivedLogprobs] = field(default_factory=list)
    """Of its output tokens, where requested."""
    prompt_logprobs: list[ReceivedLogprobs] = field(default_factory=list)
    """Of its prompt, where requested; of the first token ``UNPREDICTED``."""
    vector: list[float] = field(default_factory=list)
    """Of a request with pooling."""
    finish: FinishReason = FinishReason.RUNNING
    failed: RequestFailed | None = None

    @property
    def has_ended(self) -> bool:
        return self.finish != FinishReason.RUNNING or self.failed is not None


def columns(ids: bytes, logprobs: bytes) -> tuple[list[int], list[float]]:
    tokens, values = np.frombuffer(ids, Wire.TOKEN).tolist(), np.frombuffer(logprobs, Wire.LOGPROB).tolist()
    assert len(tokens) == len(values)
    return tokens, values


class Replies(dict[int, Reply]):
    """Replies by uid. Asserts that each batch is valid for its clients."""

    def __init__(self) -> None:
        super().__init__()
        self.flushed: list[Flushed] = []
        self.adapters: list[AdapterLoaded | AdapterRefused] = []
        self.opened: list[int] = []
        """Uids in the order in which the requests first ran."""

    def take(self, batch: TokenBatch) -> None:
        for opened in batch.opened:
            reply = self.setdefault(opened.uid, Reply())
            assert reply.opened is None and not reply.tokens and not reply.has_ended
            assert opened.started_at > 0
            reply.opened = replace(opened, started_at=0.0)  # so that equal runs have equal replies
            self.opened.append(opened.uid)
        for pooled in batch.pooled:
            reply = self[pooled.uid]
            assert reply.opened is not None and not reply.vector and not reply.has_ended
            reply.vector = np.frombuffer(pooled.data, Wire.VECTOR).tolist()
        uids = np.frombuffer(batch.uids, Wire.UID).tolist()
        tokens = np.frombuffer(batch.tokens, Wire.TOKEN).tolist()
        finishes = np.frombuffer(batch.finishes, Wire.FINISH).tolist()
        assert len(set(uids)) == len(uids)
        for uid, token, finish in zip(uids, tokens, finishes, strict=True):
            reply = self.setdefault(uid, Reply())
            assert not reply.has_ended, f"a row for {uid} after its end"
            reply.finish = FinishReason(finish)
            if token != NO_TOKEN:
                assert reply.opened is not None
                reply.tokens.append(token)
        for failed in batch.failed:
            reply = self.setdefault(failed.uid, Reply())
            assert not reply.has_ended and (
                reply.opened is None or failed.code in ("grammar_stuck", "nan_logits")
            )
            reply.failed = failed
        self._take_logprobs(batch, uids, tokens)
        self.flushed.extend(batch.flushed)
        self.adapters.extend(batch.adapters)

    def _take_logprobs(self, batch: TokenBatch, uids: list[int], tokens: list[int]) -> None:
        assert len({each.row for each in batch.logprobs}) == len(batch.logprobs)
        for each in batch.logprobs:
            received = (tokens[each.row], each.logprob, *columns(each.top_ids, each.top_logprobs))
            self[uids[each.row]].logprobs.append(received)
        for run in batch.prompt_logprobs:
            reply = self[run.uid]
            assert run.start == len(reply.prompt_logprobs), "each prompt token comes once, in order"
            top_ids, top = columns(run.top_ids, run.top_logprobs)
            tokens, values = columns(run.token_ids, run.logprobs)
            for index, (token, value) in enumerate(zip(tokens, values, strict=True)):
                part = slice(index * run.top, (index + 1) * run.top)
                assert np.isnan([value, *top[part]]).all() == (not reply.prompt_logprobs)
                predicted = (value, top_ids[part], top[part]) if reply.prompt_logprobs else UNPREDICTED
                reply.prompt_logprobs.append((token, *predicted))


class MemoryChannel(Channel):
    """A channel within one process."""

    def __init__(self) -> None:
        self.arriving: deque[SchedulerInput] = deque()
        self.waits: list[bool] = []
        """For each turn, whether the scheduler waits for a message."""
        self.sent: deque[TokenBatch] = deque()

    def receive(self, *, wait: bool, checksum: int) -> list[SchedulerInput]:
        """Return all of ``arriving``. Never blocks: there is no other thread that could add to it."""
        self.waits.append(wait)
        items = list(self.arriving)
        self.arriving.clear()
        return items

    def send(self, batch: TokenBatch) -> None:
        self.sent.append(batch)


class SimulatedStore:
    """Host copies of adapters, each read in ``turns`` turns; those in ``faulty`` cannot be read."""

    def __init__(self, engine: SimulatedEngine, limit: int) -> None:
        self.turns = 1
        self.faulty: set[int] = set()
        self.reads: list[int] = []
        """Every adapter whose read was started, in order."""
        self._engine = engine
        self._limit = limit
        self._reading: dict[int, int] = {}

    @property
    def num_reading(self) -> int:
        return len(self._reading)

    def begin_read(self, adapter_id: int, path: str) -> None:
        assert path == path_of(adapter_id)
        assert adapter_id not in self._reading and adapter_id not in self._engine.registered
        self._reading[adapter_id] = self.turns
        self.reads.append(adapter_id)
        assert len(self._reading) + len(self._engine.registered) <= self._limit

    def drop(self, adapter_id: int) -> None:
        self._engine.registered.remove(adapter_id)

    def advance(self) -> list[AdapterRead]:
        """Let a turn pass; return the reads that have ended."""
        self._reading = {adapter_id: left - 1 for adapter_id, left in self._reading.items()}
        ended = [adapter_id for adapter_id, left in self._reading.items() if left <= 0]
        for adapter_id in ended:
            del self._reading[adapter_id]
            if adapter_id not in self.faulty:
                self._engine.registered.add(adapter_id)
        return [AdapterRead(each, "no such file" if each in self.faulty else "") for each in ended]


def path_of(adapter_id: int) -> str:
    """Return the directory of an adapter, which is only a name here."""
    return f"/adapters/{adapter_id}"


def load(adapter_id: int, name: str = "") -> LoadAdapter:
    """Make the message that loads an adapter; its uid is the negative id."""
    return LoadAdapter(-adapter_id, adapter_id, name or f"adapter-{adapter_id}", path_of(adapter_id))


class SchedulerBench:
    """A scheduler, its engine and its clients. ``options`` are fields of ``Config``."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        max_model_len: int = 128,
        num_deferred_graphs: int = 0,
        adapters: Sequence[LoadAdapter] = (),
        adapter_errors: Mapping[int, str] = NO_ERRORS,
        **options: Any,
    ) -> None:
        self.config = Config(
            **{
                "page_size": 4,
                "max_model_len": max_model_len,
                "max_running_requests": 8,
                "max_num_batched_tokens": 64,
                "log_level": "debug",
                **options,
            }
        )
        self.engine = SimulatedEngine(
            num_pages=num_pages,
            page_size=self.config.page_size,
            slots=self.config.max_running_requests,
            max_model_len=max_model_len,
        )
        self.channel = MemoryChannel()
        self.store = SimulatedStore(self.engine, self.config.max_cpu_loras or self.config.max_loras)
        self.scheduler = Scheduler(
            self.config,
            eos_token_ids=(EOS,),
            num_pages=num_pages,
            engine=self.engine,
            channel=self.channel,
            num_deferred_graphs=num_deferred_graphs,
            adapter_store=self.store,
            adapters=adapters,
            adapter_errors=adapter_errors,
        )
        self.replies = Replies()
        self.stats: list[StepStats] = []

    def put(self, *items: SchedulerInput) -> None:
        """Add messages that arrive before the next turn."""
        self.channel.arriving.extend(items)

    def turn(self) -> bool:
        """Run one turn; check that every page is held once, and take the replies."""
        self.channel.arriving.extendleft(reversed(self.store.advance()))
        runs_on = self.scheduler.turn()
        self.scheduler.check()
        while self.channel.sent:
            batch = self.channel.sent.popleft()
            self.replies.take(batch)
            self.stats.append(batch.stats)
        return runs_on

    def finish(self) -> None:
        """Run turns until nothing is left to do; check that all memory is then free, or cached with the right content."""
        for _ in range(MAX_TURNS):
            has_changed = (
                self.channel.arriving or self.store.num_reading or self.scheduler._adapters.has_changed
            )
            if self.scheduler.is_idle and not has_changed:
                break
            self.turn()
        assert self.scheduler.is_idle, "requests are stuck"
        self.put(generate(-1, [], max_tokens=1))
        self.turn()
        assert self.replies.pop(-1).failed is not None  # an empty prompt: it only requests the gauges
        last = self.stats[-1]
        assert (last.queued, last.running) == (0, 0)
        assert last.pages_free + last.pages_cached == last.pages_total
        self._check_cached_content()

    def _check_cached_content(self) -> None:
        """Check that each page of the radix tree holds the KV of its tokens."""
        cache = self.scheduler._pool.cache
        if not isinstance(cache, RadixCache):
            return
        stack = [(child, list[int]()) for child in cache._root.children.values()]
        while stack:
            node, before = stack.pop()
            tokens = before + node.tokens.tolist()
            held = [cell for page in node.pages.tolist() for cell in self.engine.memory[page]]
            assert held == cells(tokens, cache._find_namespace(node).adapter_id)[len(before) :]
            stack.extend((child, tokens) for child in node.children.values())

    def total(self, counter: str) -> int:
        """Return a counter of ``StepStats``, summed over all steps."""
        return sum(getattr(stats, counter) for stats in self.stats)
