"""The ranks of one service on their own, as the offline ``LLM`` drives them."""

import shutil
import time
from collections.abc import Callable
from typing import Final

import zmq

from skiff_runtime.children import Children, Ended, make_run_dir
from skiff_runtime.config import Config
from skiff_runtime.errors import StartupError, Unavailable
from skiff_runtime.launch import Launch, Role
from skiff_runtime.messages import (
    AbortRequest,
    GenerateRequest,
    Heartbeat,
    PhaseReport,
    Ready,
    TokenBatch,
    ToSupervisor,
)
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.transport import Endpoints, Receiver, Sender

POLL_SECONDS: Final = 1.0
CLOSE_SECONDS: Final = 5.0


class Backend:
    """Spawns the ranks, and stands in for their tokenizer, detokenizer and supervisor."""

    def __init__(
        self, config: Config, model: ModelConfig, *, on_phase: Callable[[str, str], None] | None
    ) -> None:
        self.launch = Launch(config=config, model=model, run_dir=make_run_dir())
        self.launch.write()
        self._on_phase = on_phase
        endpoints = Endpoints(self.launch.run_dir)
        self._reports: Receiver[Heartbeat | PhaseReport | Ready] = Receiver(
            endpoints.supervisor, ToSupervisor
        )
        self._batches: Receiver[TokenBatch] = Receiver(endpoints.detokenizer, TokenBatch)
        self._rank0 = Sender(endpoints.rank(0))
        self._poller = zmq.Poller()
        for receiver in (self._reports, self._batches):
            self._poller.register(receiver.socket, zmq.POLLIN)
        self._children = Children(self.launch, self._poller)
        self._ready = 0
        self._ended: list[Ended] = []
        for rank in range(config.tp):
            self._children.spawn(Role.RANK, rank)

    def wait_ready(self) -> None:
        """Return once every rank serves. Raises StartupError."""
        limit = self.launch.config.startup_timeout_seconds
        deadline = time.monotonic() + limit
        while self._ready < self.launch.config.tp:
            if time.monotonic() > deadline:
                raise StartupError(f"the ranks were not ready within {limit:g} s")
            self._poller.poll(int(POLL_SECONDS * 1000))
            self._watch()

    def send(self, message: GenerateRequest | AbortRequest) -> None:
        """Pass a message to rank 0."""
        self._rank0.send(message)

    def receive(self) -> TokenBatch:
        """The next step's tokens. Raises Unavailable when a rank has ended."""
        while True:
            self._poller.poll(int(POLL_SECONDS * 1000))
            batches = self._batches.drain(1)
            if batches:
                return batches[0]
            self._watch()

    def close(self) -> None:
        """End the ranks and remove their directory; idempotent."""
        self._children.terminate(CLOSE_SECONDS)
        for closable in (self._rank0, self._reports, self._batches):
            closable.close()
        shutil.rmtree(self.launch.run_dir, ignore_errors=True)

    def _watch(self) -> None:
        """Take what the ranks report, and notice when one has ended."""
        for message in self._reports.drain(1024):
            if isinstance(message, Ready):
                self._ready += 1
            elif isinstance(message, PhaseReport) and message.progress == 0 and self._on_phase is not None:
                self._on_phase(message.process, message.phase)
        self._ended += self._children.reap()
        if self._ended:
            text = "; ".join(str(each) for each in self._ended)
            if self._ready < self.launch.config.tp:
                raise StartupError(f"{text}; its log above says why")
            raise Unavailable(f"{text}; this LLM cannot be used any more")
