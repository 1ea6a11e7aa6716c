"""The worker process of one tensor-parallel rank: a scheduler and its engine.

Rank 0 receives all messages, and sends those of each turn of the loop to every other rank. So all ranks see
the same messages in the same order, and plan the same steps without further coordination.
"""

import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch

from skiff_runtime.attention.selector import import_ahead
from skiff_runtime.config import Config
from skiff_runtime.distributed.tensor_parallel import TensorParallelGroup
from skiff_runtime.engine.engine import Engine
from skiff_runtime.errors import SkiffError
from skiff_runtime.kernels import kernel_cache
from skiff_runtime.messages import (
    AdapterRead,
    CompiledGrammar,
    GenerateRequest,
    LoadAdapter,
    ProfileSteps,
    RankInputs,
    Shutdown,
    TokenBatch,
    ToLeader,
    ToScheduler,
)
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender, send_to_all
from skiff_runtime.processes.child_process import Child
from skiff_runtime.scheduler.channel import Channel, SchedulerInput
from skiff_runtime.scheduler.scheduler import Scheduler
from skiff_runtime.worker.adapter_reader import AdapterReader
from skiff_runtime.worker.grammar_gate import GrammarGate, LoadGrammar
from skiff_runtime.worker.rank_inputs import pack_inputs, unpack_items
from skiff_runtime.worker.step_profiler import StepProfiler
from skiff_runtime.worker.step_watchdog import StepWatchdog

IDLE_POLL_SECONDS: Final = 0.2
"""Most time that an idle rank 0 waits for a message before its next turn, in which it sends a heartbeat or stops."""
LOADING_POLL_SECONDS: Final = 0.002
"""Poll interval while a grammar or an adapter is being read for a request."""
MAX_MESSAGES_PER_TURN: Final = 256
"""Most messages handled in one turn, so that a flood of them does not stall the running batch."""
MAX_BYTES_PER_TURN: Final = 256 << 20
"""Bytes of messages after which a turn takes no more. The same limit holds for requests that the grammar gate releases, and the last
message may exceed each, so that a message to the other ranks stays below ``MAX_MESSAGE_BYTES``."""
COLLECTIVE_MARGIN_SECONDS: Final = 60.0
"""Time by which a collective outlasts the limits that end the service in an orderly way."""


LeaderInbox = Receiver[ToLeader]


class LockstepError(SkiffError):
    """Two ranks planned different steps, so their KV caches differ."""


class LeaderChannel(Channel):
    """Rank 0's channel: requests come from the tokenizers, token batches go to the detokenizer."""

    def __init__(
        self,
        inbox: LeaderInbox,
        endpoints: Endpoints,
        tp_size: int,
        *,
        should_stop: Callable[[], bool],
        profiler: StepProfiler,
        load_grammar: LoadGrammar,
        adapters: AdapterReader | None = None,
    ) -> None:
        self._inbox = inbox
        self._profiler = profiler
        self._adapters = adapters
        self._gate = GrammarGate(load_grammar, max_released_bytes=MAX_BYTES_PER_TURN)
        self._detokenizer = Sender(endpoints.detokenizer)
        self._followers = [Sender(endpoints.rank(rank)) for rank in range(1, tp_size)]
        self._should_stop = should_stop

    def receive(self, *, wait: bool, checksum: int) -> list[SchedulerInput]:
        """Return what arrived for this turn, after sending it to every other rank.

        The profiler starts and ends before anything is sent, so the other ranks have launched nothing further.
        """
        self._profiler.before_turn(idle=wait)
        if wait:
            is_loading = self._gate or (self._adapters is not None and self._adapters.is_reading)
            self._inbox.socket.poll(int((LOADING_POLL_SECONDS if is_loading else IDLE_POLL_SECONDS) * 1000))
        arrived = self._drain_inbox()
        items: list[SchedulerInput] = [] if self._adapters is None else [*self._adapters.take_finished()]
        items += self._gate.admit(arrived)
        if self._should_stop():
            items.append(Shutdown())
        if self._followers:
            send_to_all(self._followers, pack_inputs(items, self._find_held_grammars(arrived), checksum))
        return items

    def _drain_inbox(self) -> list[ToScheduler]:
        arrived: list[ToScheduler] = []
        for message in self._inbox.drain(MAX_MESSAGES_PER_TURN, MAX_BYTES_PER_TURN):
            if isinstance(message, ProfileSteps):
                self._profiler.begin(message)
            else:
                arrived.append(message)
        return arrived

    def _find_held_grammars(self, arrived: list[ToScheduler]) -> list[CompiledGrammar]:
        """Return grammars of requests that the gate holds back: the other ranks may start loading them."""
        return [
            each.grammar
            for each in arrived
            if isinstance(each, GenerateRequest) and each.grammar is not None and each.uid in self._gate
        ]

    def send(self, batch: TokenBatch) -> None:
        self._detokenizer.send(batch)


class FollowerChannel(Channel):
    """Any other rank's channel: it receives what rank 0 received, and sends nothing."""

    def __init__(
        self,
        inbox: Receiver[RankInputs],
        *,
        beat: Callable[[], None],
        load_grammar: LoadGrammar,
        adapters: AdapterReader | None = None,
    ) -> None:
        self._inbox = inbox
        self._beat = beat
        self._load_grammar = load_grammar
        self._adapters = adapters

    def receive(self, *, wait: bool, checksum: int) -> list[SchedulerInput]:
        """Return rank 0's messages of this turn. Raises ``LockstepError`` if rank 0 planned other steps."""
        while (inbox := self._inbox.receive(IDLE_POLL_SECONDS)) is None:
            self._beat()
        if inbox.checksum != checksum:
            raise LockstepError(
                f"this rank planned other steps than rank 0: checksum {checksum:08x}, not {inbox.checksum:08x}"
            )
        for grammar in inbox.grammars:
            self._load_grammar(grammar)
        for item in inbox.items:
            if isinstance(item, AdapterRead):
                assert self._adapters is not None
                self._adapters.settle(item, self._beat)
        return unpack_items(inbox)

    def send(self, batch: TokenBatch) -> None:
        """Do nothing: rank 0 sends the same batch."""


def run(child: Child) -> None:
    """Run a rank's process; its main function.

    After an error nothing is closed: a step may wait in a collective for ever, so the process just ends, and
    the supervisor ends the other ranks.
    """
    config, model = child.launch.config, child.launch.model
    profiler = StepProfiler(child.announce_pause)
    connect = _bind(child)
    child.report_phase("config")
    if config.device == "cuda" and config.kernel_cache_dir is not None:
        kernel_cache.activate(Path(config.kernel_cache_dir), child.launch.run_dir)
    if config.device == "cuda":
        import_ahead(config.attention_backend, torch.device("cuda", child.index))
    group = TensorParallelGroup.start(
        tp_rank=child.index,
        tp_size=config.tp_size,
        device=config.device,
        run_dir=child.launch.run_dir,
        timeout_seconds=_collective_timeout(config),
        all_reduce=config.all_reduce,
    )
    gc.freeze()  # else each garbage collection of the memory profile would scan torch's objects, for 0.1 s
    engine = Engine(config, model, group, on_phase=child.report_phase)
    adapters = AdapterReader(engine) if config.enable_lora else None
    engine.warmup(defer_captures=not config.disable_deferred_graph_capture)
    _serve(child, engine, connect(engine, profiler, adapters), profiler, adapters)
    if adapters is not None:
        adapters.close()
    engine.close()
    group.close()


def _collective_timeout(config: Config) -> float:
    """Return a limit on collectives beyond those of supervisor and step watchdog, which report the reason to clients."""
    assert config.watchdog_timeout is not None
    return max(config.startup_timeout_seconds, config.watchdog_timeout) + COLLECTIVE_MARGIN_SECONDS


def _bind(child: Child) -> Callable[[Engine, StepProfiler, AdapterReader | None], Channel]:
    """Bind the rank's socket at once, so that senders can connect; return how to make the channel of an engine."""
    endpoints = child.endpoints
    if child.index == 0:
        leader: LeaderInbox = Receiver(endpoints.rank(0), ToLeader)
        return lambda engine, profiler, adapters: LeaderChannel(
            leader,
            endpoints,
            child.launch.config.tp_size,
            should_stop=lambda: child.should_stop,
            profiler=profiler,
            load_grammar=engine.load_grammar,
            adapters=adapters,
        )
    inbox: Receiver[RankInputs] = Receiver(endpoints.rank(child.index), RankInputs)
    return lambda engine, _, adapters: FollowerChannel(
        inbox, beat=child.beat, load_grammar=engine.load_grammar, adapters=adapters
    )


def _serve(
    child: Child, engine: Engine, channel: Channel, profiler: StepProfiler, adapters: AdapterReader | None
) -> None:
    config = child.launch.config
    assert config.watchdog_timeout is not None
    start_adapters = child.launch.adapters
    errors: Mapping[int, str] = {}
    if adapters is not None:
        assert config.max_cpu_loras is not None, "the configuration is resolved"
        errors = adapters.preload(start_adapters, config.max_cpu_loras)
    watchdog = StepWatchdog(engine, timeout_seconds=config.watchdog_timeout, beat=child.beat)
    scheduler = Scheduler(
        config,
        eos_token_ids=child.launch.model.eos_token_ids,
        num_pages=engine.num_pages,
        engine=profiler.wrap(watchdog),
        channel=channel,
        num_deferred_graphs=engine.num_deferred_graphs,
        adapter_store=adapters,
        adapters=[LoadAdapter(0, each.adapter_id, each.name, each.path) for each in start_adapters],
        adapter_errors=errors,
    )
    child.report_phase("ready")
    child.report_ready(kv_tokens=engine.num_pages * config.page_size)
    has_prepared = False
    while scheduler.turn():
        child.beat()
        # Its imports slow steps down, so they come after the first requests and captures, while nothing runs.
        if not has_prepared and scheduler.is_idle and not scheduler.num_pending_captures:
            engine.prepare_grammars()
            has_prepared = True
