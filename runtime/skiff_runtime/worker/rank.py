"""One tensor-parallel rank: a scheduler and its engine in one process.

Rank 0 receives requests and tells every other rank what arrived in each turn of the
loop, so that all ranks see the same messages in the same order and plan the same steps.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Final

from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.engine import Engine
from skiff_runtime.errors import SkiffError
from skiff_runtime.kernels import kernel_cache as cache
from skiff_runtime.messages import (
    AbortRequest,
    CompiledGrammar,
    FlushCache,
    GenerateRequest,
    ProfileSteps,
    RankInputs,
    Shutdown,
    TokenBatch,
    ToLeader,
    ToScheduler,
)
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender
from skiff_runtime.processes.child_process import Child
from skiff_runtime.scheduler.channel import Channel, Item
from skiff_runtime.scheduler.scheduler import Scheduler
from skiff_runtime.worker.grammar_gate import GrammarGate, Read
from skiff_runtime.worker.step_profiler import StepProfiler
from skiff_runtime.worker.step_watchdog import StepWatchdog

IDLE_SECONDS: Final = 0.2
"""How long an idle rank 0 waits for work before it turns its loop (and beats, or sees that it is to end) anyway."""
GRAMMAR_POLL_SECONDS: Final = 0.002
"""The same, while a request waits for its grammar to be read."""
MAX_MESSAGES_PER_TURN: Final = 256
"""Most messages taken in one turn, so that a flood never stalls the running batch."""


LeaderInbox = Receiver[GenerateRequest | AbortRequest | FlushCache | ProfileSteps]


class LockstepError(SkiffError):
    """Two ranks planned different steps; their KV caches no longer agree."""


class LeaderChannel(Channel):
    """Rank 0's: requests come from tokenizers, token batches go to the detokenizer."""

    def __init__(
        self,
        inbox: LeaderInbox,
        endpoints: Endpoints,
        size: int,
        *,
        should_stop: Callable[[], bool],
        profiler: StepProfiler,
        read: Read,
    ) -> None:
        self._inbox = inbox
        self._profiler = profiler
        self._gate = GrammarGate(read)
        self._detokenizer = Sender(endpoints.detokenizer)
        self._followers = [Sender(endpoints.rank(rank)) for rank in range(1, size)]
        self._should_stop = should_stop

    def receive(self, *, wait: bool, digest: int) -> list[Item]:
        """What arrived for this turn, told to every other rank."""
        if wait:
            self._profiler.finish()
            self._inbox.socket.poll(int((GRAMMAR_POLL_SECONDS if self._gate else IDLE_SECONDS) * 1000))
        arrived = self._arrived()
        items: list[Item] = [*self._gate.admit(arrived)]
        if self._should_stop():
            items.append(Shutdown())
        if self._followers:
            inbox = RankInputs(items=items, digest=digest, grammars=self._held_grammars(arrived))
            for follower in self._followers:
                follower.send(inbox)
        return items

    def _arrived(self) -> list[ToScheduler]:
        arrived: list[ToScheduler] = []
        for message in self._inbox.drain(MAX_MESSAGES_PER_TURN):
            if isinstance(message, ProfileSteps):
                self._profiler.begin(message)
            else:
                arrived.append(message)
        return arrived

    def _held_grammars(self, arrived: list[ToScheduler]) -> list[CompiledGrammar]:
        """Those that the other ranks may begin to read."""
        return [
            each.grammar
            for each in arrived
            if isinstance(each, GenerateRequest) and each.grammar is not None and each.uid in self._gate
        ]

    def send(self, batch: TokenBatch) -> None:
        self._detokenizer.send(batch)


class FollowerChannel(Channel):
    """Any other rank's: it takes what rank 0 took, and says nothing."""

    def __init__(self, inbox: Receiver[RankInputs], *, beat: Callable[[], None], read: Read) -> None:
        self._inbox = inbox
        self._beat = beat
        self._read = read

    def receive(self, *, wait: bool, digest: int) -> list[Item]:
        """Rank 0's items for this turn; LockstepError when it planned another step than we did."""
        while (inbox := self._inbox.receive(IDLE_SECONDS)) is None:
            self._beat()
        if inbox.digest != digest:
            raise LockstepError(f"rank 0 planned step {inbox.digest:08x}, this rank {digest:08x}")
        for grammar in inbox.grammars:
            self._read(grammar)
        return list(inbox.items)

    def send(self, batch: TokenBatch) -> None:
        """Only rank 0 reports."""


def run(child: Child) -> None:
    """Main function of a rank's process.

    After an error nothing is closed: another step may wait in a collective for ever, so the
    process just ends, and the supervisor ends the other ranks.
    """
    config, model = child.launch.config, child.launch.model
    profiler = StepProfiler()
    connect = _bind(child)
    child.phase("config")
    if config.device == "cuda" and config.kernel_cache_dir is not None:
        cache.activate(Path(config.kernel_cache_dir), child.launch.run_dir)
    group = TensorParallelGroup.start(
        rank=child.index, size=config.tp_size, device=config.device, run_dir=child.launch.run_dir
    )
    gc.freeze()  # else each collection of the memory profile would take a tenth of a second to look at torch
    engine = Engine(config, model, group, on_phase=child.phase)
    engine.warmup()
    _serve(child, engine, connect(engine, profiler), profiler)
    engine.close()
    group.close()


def _bind(child: Child) -> Callable[[Engine, StepProfiler], Channel]:
    """Be there for senders at once; the channel itself needs the engine."""
    endpoints, ranks = child.endpoints, child.launch.config.tp_size
    if child.index == 0:
        leader: LeaderInbox = Receiver(endpoints.rank(0), ToLeader)
        return lambda engine, profiler: LeaderChannel(
            leader,
            endpoints,
            ranks,
            should_stop=lambda: child.stopping,
            profiler=profiler,
            read=engine.load_grammar,
        )
    inbox: Receiver[RankInputs] = Receiver(endpoints.rank(child.index), RankInputs)
    return lambda engine, _: FollowerChannel(inbox, beat=child.beat, read=engine.load_grammar)


def _serve(child: Child, engine: Engine, channel: Channel, profiler: StepProfiler) -> None:
    config = child.launch.config
    patient = StepWatchdog(engine, timeout_seconds=config.watchdog_timeout, beat=child.beat)
    scheduler = Scheduler(
        config,
        eos_token_ids=child.launch.model.eos_token_ids,
        num_pages=engine.num_pages,
        engine=profiler.watch(patient),
        channel=channel,
    )
    child.phase("ready")
    child.ready(kv_tokens=engine.num_pages * config.page_size)
    while scheduler.turn():
        child.beat()
