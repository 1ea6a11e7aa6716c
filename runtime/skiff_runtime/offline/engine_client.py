"""The ranks of one service on their own, as the offline ``LLM`` drives them."""

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
    PhaseReport,
    ProcessFailed,
    ProfileSteps,
    Ready,
    StepStats,
    TokenBatch,
    ToSupervisor,
)
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.processes.child_process import process_name
from skiff_runtime.processes.children import Children, Ended, make_run_dir
from skiff_runtime.processes.launch import Launch, Role

POLL_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 5.0
MAX_REPORTS: Final = 1024


class EngineClient:
    """Spawns the ranks, and stands in for their tokenizer, detokenizer and supervisor.

    It never waits for ever: a rank that ends, or is silent for ``heartbeat_timeout_seconds`` while something
    is waited for, is an error. Nothing remains of it after ``close``, nor after the end of this process.
    """

    def __init__(
        self, config: Config, model: ModelConfig, *, on_phase: Callable[[str, str], None] | None
    ) -> None:
        self.launch = Launch(config=config, model=model, run_dir=make_run_dir())
        self._held = _Held(self.launch.run_dir)
        self.close = weakref.finalize(self, self._held.release)
        self.launch.write()
        self._on_phase = on_phase
        self.on_step: Callable[[StepStats], None] | None = None
        """Told of each step (and of other news of the scheduler), if set."""
        endpoints = Endpoints(self.launch.run_dir)
        self._reports: Receiver[ToSupervisor] = Receiver(endpoints.supervisor, ToSupervisor)
        self._batches: Receiver[TokenBatch] = Receiver(endpoints.detokenizer, TokenBatch)
        self._rank0 = Sender(endpoints.rank(0))
        self._poller = zmq.Poller()
        for receiver in (self._reports, self._batches):
            self._poller.register(receiver.socket, zmq.POLLIN)
        self._children = Children(self.launch, self._poller)
        self._compilations = GrammarCompileQueue(self.launch, zmq.Poller())
        self._held.take(self._children, self._compilations, [self._rank0, self._reports, self._batches])
        self._ready = 0
        self._ended: list[Ended] = []
        self._heard: dict[str, float] = {}
        self._reasons: dict[str, str] = {}
        for rank in range(config.tp_size):
            self._children.spawn(Role.RANK, rank)

    def wait_ready(self) -> None:
        """Return once every rank serves. Raises StartupError."""
        limit = self.launch.config.startup_timeout_seconds
        deadline = time.monotonic() + limit
        while self._ready < self.launch.config.tp_size:
            if time.monotonic() > deadline:
                raise StartupError(f"the ranks were not ready within {limit:g} s")
            self._poller.poll(int(POLL_SECONDS * 1000))
            self._watch()

    def send(self, message: GenerateRequest | AbortRequest | ProfileSteps) -> None:
        """Pass a message to rank 0."""
        self._rank0.send(message)

    def receive(self) -> TokenBatch:
        """The next step's tokens. Raises Unavailable when a rank has ended, or does not beat any more."""
        started = time.monotonic()
        while True:
            self._poller.poll(int(POLL_SECONDS * 1000))
            batches = self._batches.drain(1)
            if batches:
                if self.on_step is not None:
                    self.on_step(batches[0].stats)
                return batches[0]
            self._watch()
            self._check_beats(started)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """A grammar made ready for the model. Raises RequestError where it cannot be, or takes too long."""
        return self._compilations.wait(grammar)

    def _watch(self) -> None:
        """Take what the ranks report, and notice when one has ended."""
        for message in self._reports.drain(MAX_REPORTS):
            self._heard[message.process] = time.monotonic()
            if isinstance(message, Ready):
                self._ready += 1
            elif isinstance(message, ProcessFailed):
                self._reasons[message.process] = message.message
            elif isinstance(message, PhaseReport) and message.progress == 0 and self._on_phase is not None:
                self._on_phase(message.process, message.phase)
        self._ended += self._children.reap()
        if self._ended:
            text = "; ".join(self._told(each) for each in self._ended)
            if self._ready < self.launch.config.tp_size:
                raise StartupError(f"{text}; its log above says why")
            raise Unavailable(f"{text}; this LLM cannot be used any more")

    def _told(self, ended: Ended) -> str:
        reason = self._reasons.get(ended.name)
        return str(ended) if reason is None else f"{ended} ({reason})"

    def _check_beats(self, started: float) -> None:
        """Give up on ranks that have been silent for too long since ``started``; all of them end."""
        limit = self.launch.config.heartbeat_timeout_seconds
        for rank in range(self.launch.config.tp_size):
            name = process_name(Role.RANK, rank)
            if time.monotonic() - max(started, self._heard.get(name, 0.0)) > limit:
                for each in self._children.running:
                    self._children.kill(each)
                self._ended += self._children.wait(CLOSE_SECONDS)
                raise Unavailable(
                    f"{name} has been silent for {limit:g} s (--heartbeat-timeout-seconds); "
                    "this LLM cannot be used any more"
                )


_Socket = Sender | Receiver[ToSupervisor] | Receiver[TokenBatch]


class _Held:
    """What must not outlive a ``EngineClient``; apart from it, so that a finalizer can hold it."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._children: Children | None = None
        self._compilations: GrammarCompileQueue | None = None
        self._sockets: list[_Socket] = []

    def take(
        self,
        children: Children,
        compilations: GrammarCompileQueue,
        sockets: list[_Socket],
    ) -> None:
        """Be responsible for these."""
        self._children, self._compilations, self._sockets = children, compilations, sockets

    def release(self) -> None:
        """End the processes, close the sockets, remove the directory; each of these though another fails."""
        with ExitStack() as steps:
            steps.callback(shutil.rmtree, self._run_dir, ignore_errors=True)
            for socket in self._sockets:
                steps.callback(socket.close)
            if self._children is not None:
                steps.callback(self._children.terminate, CLOSE_SECONDS)
            if self._compilations is not None:
                steps.callback(self._compilations.close)
