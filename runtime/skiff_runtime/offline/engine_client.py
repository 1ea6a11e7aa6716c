"""Client of the engine for the offline ``LLM``: spawns the ranks and exchanges messages with them over ZeroMQ."""

import shutil
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import zmq

from skiff_runtime.config import Config
from skiff_runtime.errors import StartupError, Unavailable
from skiff_runtime.grammar.compiler.compile_queue import GrammarCompileQueue
from skiff_runtime.messages import (
    AbortRequest,
    CompiledGrammar,
    GenerateRequest,
    Grammar,
    LoadAdapter,
    PhaseReport,
    ProcessFailed,
    ProfileSteps,
    Ready,
    StepStats,
    TokenBatch,
    ToSupervisor,
    UnloadAdapter,
)
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.processes.children import ChildExit, Children, make_run_dir
from skiff_runtime.processes.heartbeat_monitor import HeartbeatMonitor
from skiff_runtime.processes.launch import Launch, Role

POLL_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 5.0
MAX_REPORTS: Final = 1024


class EngineClient:
    """Spawns the ranks, and takes the places of their tokenizer, detokenizer and supervisor.

    No wait is unbounded: a rank that ends, or sends no heartbeat for ``rank_heartbeat_timeout_seconds`` during a wait,
    is an error, which ends the other ranks, too. ``close``, or the end of this process, ends all child processes and
    removes their files.
    """

    def __init__(
        self, config: Config, model: ModelConfig, *, on_phase: Callable[[str, str], None] | None
    ) -> None:
        self.launch = Launch(config=config, model=model, run_dir=make_run_dir())
        self._resources = _OwnedResources(self.launch.run_dir)
        self.close = weakref.finalize(self, self._resources.release)
        self.launch.write()
        self._on_phase = on_phase
        self.on_step: Callable[[StepStats], None] | None = None
        """Called with the statistics of each batch that arrives, if set."""
        endpoints = Endpoints(self.launch.run_dir)
        self._reports: Receiver[ToSupervisor] = Receiver(endpoints.supervisor, ToSupervisor)
        self._batches: Receiver[TokenBatch] = Receiver(endpoints.detokenizer, TokenBatch)
        self._rank0 = Sender(endpoints.rank(0))
        self._poller = zmq.Poller()
        for receiver in (self._reports, self._batches):
            self._poller.register(receiver.socket, zmq.POLLIN)
        self._children = Children(self.launch, self._poller)
        self._compile_queue = GrammarCompileQueue(self.launch, zmq.Poller())
        self._resources.add(self._children, self._compile_queue, [self._rank0, self._reports, self._batches])
        self._ready = 0
        self._ended: list[ChildExit] = []
        self._heartbeats = HeartbeatMonitor(config)
        self._reasons: dict[str, str] = {}
        for rank in range(config.tp_size):
            self._children.spawn(Role.RANK, rank)

    def wait_ready(self) -> None:
        """Wait until every rank is ready.

        Raises:
            StartupError: a rank has ended, or ``startup_timeout_seconds`` are over.
        """
        limit = self.launch.config.startup_timeout_seconds
        deadline = time.monotonic() + limit
        while self._ready < self.launch.config.tp_size:
            if time.monotonic() > deadline:
                raise StartupError(f"the ranks were not ready within {limit:g} s")
            self._poller.poll(int(POLL_SECONDS * 1000))
            self._check_ranks()

    def send(
        self, message: GenerateRequest | AbortRequest | ProfileSteps | LoadAdapter | UnloadAdapter
    ) -> None:
        """Send a message to rank 0."""
        self._rank0.send(message)

    def receive(self) -> TokenBatch:
        """Wait for the tokens of the next step.

        Raises:
            Unavailable: a rank has ended, or has sent no heartbeat for too long.
        """
        while True:
            self._poller.poll(int(POLL_SECONDS * 1000))
            batches = self._batches.drain(1)  # one step at a time, so that each is reported by itself
            if batches:
                if self.on_step is not None:
                    self.on_step(batches[0].stats)
                return batches[0]
            self._check_ranks()
            self._check_heartbeats()

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile a grammar for the model.

        Raises:
            RequestError: the grammar is invalid, or takes too long to compile.
        """
        return self._compile_queue.compile(grammar)

    def _check_ranks(self) -> None:
        """Process the reports of the ranks, and raise an error if a rank has ended."""
        self._heartbeats.begin_turn()
        for message in self._reports.drain(MAX_REPORTS):
            self._heartbeats.record(message)
            if isinstance(message, Ready):
                self._ready += 1
            elif isinstance(message, ProcessFailed):
                self._reasons[message.process] = message.message
            elif isinstance(message, PhaseReport) and message.progress == 0 and self._on_phase is not None:
                self._on_phase(message.process, message.phase)
        self._ended += self._children.reap()
        if self._ended:
            self._kill_ranks()  # the others wait for it in a collective, where SIGTERM does not end them
            text = "; ".join(self._describe(each) for each in self._ended)
            if self._ready < self.launch.config.tp_size:
                raise StartupError(f"{text}; see its log above")
            raise Unavailable(f"{text}; this LLM is no longer usable")

    def _describe(self, ended: ChildExit) -> str:
        reason = self._reasons.get(ended.name)
        return str(ended) if reason is None else f"{ended} ({reason})"

    def _check_heartbeats(self) -> None:
        """End all ranks, and raise Unavailable, if one has been silent for too long."""
        silence = self._heartbeats.describe_silence(self._children.running)
        if silence is not None:
            self._kill_ranks()
            self._ended += self._children.wait(CLOSE_SECONDS)
            raise Unavailable(f"{silence}; this LLM is no longer usable")

    def _kill_ranks(self) -> None:
        for each in self._children.running:
            self._children.kill(each)


_Socket = Sender | Receiver[ToSupervisor] | Receiver[TokenBatch]


class _OwnedResources:
    """Processes, sockets and files that must not outlive an ``EngineClient``.

    The client's finalizer refers to this object, since a finalizer that referred to the client would keep it alive.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._children: Children | None = None
        self._compile_queue: GrammarCompileQueue | None = None
        self._sockets: list[_Socket] = []

    def add(self, children: Children, compile_queue: GrammarCompileQueue, sockets: list[_Socket]) -> None:
        self._children, self._compile_queue, self._sockets = children, compile_queue, sockets

    def release(self) -> None:
        """End the processes, close the sockets and remove the directory, each even if another of these fails."""
        # ExitStack runs all callbacks, the last one first: processes end before their sockets and files go.
        with ExitStack() as steps:
            steps.callback(shutil.rmtree, self._run_dir, ignore_errors=True)
            for socket in self._sockets:
                steps.callback(socket.close)
            if self._children is not None:
                steps.callback(self._children.terminate, CLOSE_SECONDS)
            if self._compile_queue is not None:
                steps.callback(self._compile_queue.close)
