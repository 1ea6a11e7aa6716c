"""One tensor-parallel rank: a scheduler and its engine in one process.

Rank 0 receives requests and tells every other rank what arrived in each turn of the
loop, so that all ranks see the same messages in the same order and plan the same steps.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from skiff_runtime.distributed.group import TensorParallel
from skiff_runtime.engine.engine import Engine
from skiff_runtime.errors import SkiffError
from skiff_runtime.kernels import cache
from skiff_runtime.messages import (
    AbortRequest,
    FlushCache,
    GenerateRequest,
    Inbox,
    ProfileSteps,
    Shutdown,
    TokenBatch,
    ToLeader,
)
from skiff_runtime.patience import PatientEngine
from skiff_runtime.process import Child
from skiff_runtime.profiling import StepProfiler
from skiff_runtime.scheduler.channel import Channel, Item
from skiff_runtime.scheduler.loop import Scheduler
from skiff_runtime.transport import Endpoints, Receiver, Sender

IDLE_SECONDS: Final = 1.0
"""How long an idle rank 0 waits for work before it turns its loop (and beats) anyway."""
TURN_MESSAGES: Final = 256
"""Most messages taken in one turn, so that a flood never stalls the running batch."""


class LockstepError(SkiffError):
    """Two ranks planned different steps; their KV caches no longer agree."""


class LeaderChannel(Channel):
    """Rank 0's: requests come from tokenizers, token batches go to the detokenizer."""

    def __init__(
        self, endpoints: Endpoints, size: int, should_stop: Callable[[], bool], profiler: StepProfiler
    ) -> None:
        self._inbox: Receiver[GenerateRequest | AbortRequest | FlushCache | ProfileSteps] = Receiver(
            endpoints.rank(0), ToLeader
        )
        self._profiler = profiler
        self._detokenizer = Sender(endpoints.detokenizer)
        self._followers = [Sender(endpoints.rank(rank)) for rank in range(1, size)]
        self._should_stop = should_stop

    def receive(self, *, wait: bool, digest: int) -> list[Item]:
        """What arrived for this turn, told to every other rank."""
        if wait:
            self._profiler.finish()
            self._inbox.socket.poll(int(IDLE_SECONDS * 1000))
        items: list[Item] = []
        for message in self._inbox.drain(TURN_MESSAGES):
            if isinstance(message, ProfileSteps):
                self._profiler.begin(message)
            else:
                items.append(message)
        if self._should_stop():
            items.append(Shutdown())
        if self._followers:
            inbox = Inbox(items=items, digest=digest)
            for follower in self._followers:
                follower.send(inbox)
        return items

    def send(self, batch: TokenBatch) -> None:
        self._detokenizer.send(batch)


class FollowerChannel(Channel):
    """Any other rank's: it takes what rank 0 took, and says nothing."""

    def __init__(self, endpoints: Endpoints, rank: int, beat: Callable[[], None]) -> None:
        self._inbox: Receiver[Inbox] = Receiver(endpoints.rank(rank), Inbox)
        self._beat = beat

    def receive(self, *, wait: bool, digest: int) -> list[Item]:
        """Rank 0's items for this turn; LockstepError when it planned another step than we did."""
        while (inbox := self._inbox.receive(IDLE_SECONDS)) is None:
            self._beat()
        if inbox.digest != digest:
            raise LockstepError(f"rank 0 planned step {inbox.digest:08x}, this rank {digest:08x}")
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
    channel = _channel(child, profiler)
    child.phase("config")
    if config.device == "cuda" and config.kernel_cache_dir is not None:
        cache.activate(Path(config.kernel_cache_dir), child.launch.run_dir)
    group = TensorParallel.start(
        rank=child.index, size=config.tp, device=config.device, run_dir=child.launch.run_dir
    )
    engine = Engine(config, model, group, on_phase=child.phase)
    engine.warmup()
    _serve(child, engine, channel, profiler)
    engine.close()
    group.close()


def _channel(child: Child, profiler: StepProfiler) -> Channel:
    if child.index == 0:
        return LeaderChannel(child.endpoints, child.launch.config.tp, lambda: child.stopping, profiler)
    return FollowerChannel(child.endpoints, child.index, child.beat)


def _serve(child: Child, engine: Engine, channel: Channel, profiler: StepProfiler) -> None:
    config = child.launch.config
    patient = PatientEngine(engine, timeout_seconds=config.step_timeout_seconds, beat=child.beat)
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
