"""Start, watch, drain and stop the processes of one service; PID 1 of its container.

If any child dies or falls silent, the api process ends every request with an error and
the whole service exits non-zero: never one rank alone. SIGTERM drains and exits 0.
"""

import contextlib
import os
import shutil
import signal
import socket
import time
from typing import Final

import zmq

from skiff_runtime import log
from skiff_runtime.config import Config
from skiff_runtime.contract import EXIT_CHILD_DIED, EXIT_OK, EXIT_STARTUP_FAILED, PHASES
from skiff_runtime.messages import (
    Drain,
    Heartbeat,
    PhaseReport,
    ProcessFailed,
    ProcessHealth,
    Ready,
    ServiceFailed,
    ServiceReady,
    ToSupervisor,
)
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.processes.child_process import process_name
from skiff_runtime.processes.children import Children, Ended, make_run_dir
from skiff_runtime.processes.launch import Launch, Role

Report = Heartbeat | PhaseReport | Ready | ProcessFailed
TURN_SECONDS: Final = 1.0
FAILURE_GRACE_SECONDS: Final = 2.0
"""How long the api process may take to tell its clients that the service failed."""
DRAIN_MARGIN_SECONDS: Final = 5.0
TERMINATE_SECONDS: Final = 5.0
_API: Final = process_name(Role.API, 0)


def serve(config: Config, model: ModelConfig) -> int:
    """Run a service until it is told to stop or fails; the exit code."""
    launch = Launch(config=config, model=model, run_dir=make_run_dir())
    try:
        launch.write()
        return Supervisor(launch).run()
    finally:
        shutil.rmtree(launch.run_dir, ignore_errors=True)


class Supervisor:
    """One service's processes, seen from above."""

    def __init__(self, launch: Launch) -> None:
        self._config = launch.config
        endpoints = Endpoints(launch.run_dir)
        self._inbox: Receiver[Report] = Receiver(endpoints.supervisor, ToSupervisor)
        self._api = Sender(endpoints.api, timeout_seconds=FAILURE_GRACE_SECONDS)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._children = Children(launch, self._poller)
        self._started = time.monotonic()
        self._last_beat: dict[str, float] = {}
        self._failures: dict[str, str] = {}
        """What processes said of their end."""
        self._told_beats = 0.0
        self._phases: dict[str, str] = {}
        """The start phase that each process was last heard to be in."""
        self._ready: dict[str, Ready] = {}
        self._serving = False
        self._signals = 0
        self._drain_deadline: float | None = None

    def run(self) -> int:
        """Start, watch, drain or fail; the exit code."""
        wakeup = self._catch_signals()
        try:
            self._spawn()
            while True:
                code = self._turn(wakeup)
                if code is not None:
                    return code
        finally:
            self._children.terminate(TERMINATE_SECONDS)
            self._inbox.close()
            self._api.close()

    def _catch_signals(self) -> socket.socket:
        """Turn SIGTERM and SIGINT into something that wakes the poller."""
        wakeup, sender = socket.socketpair()
        wakeup.setblocking(False)
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.detach())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note_signal)
        self._poller.register(wakeup, zmq.POLLIN)
        return wakeup

    def _note_signal(self, _number: int, _frame: object) -> None:
        self._signals += 1

    def _spawn(self) -> None:
        self._children.spawn(Role.API)
        for rank in range(self._config.tp_size):
            self._children.spawn(Role.RANK, rank)
        for index in range(self._config.tokenizer_worker_num):
            self._children.spawn(Role.TOKENIZER, index)
        self._children.spawn(Role.DETOKENIZER)
        log.event("processes_started", pid=os.getpid(), processes=len(self._children.running))

    def _turn(self, wakeup: socket.socket) -> int | None:
        """One turn of the main loop; an exit code when the service is over."""
        self._poller.poll(int(TURN_SECONDS * 1000))
        self._swallow(wakeup)
        for message in self._inbox.drain(1024):
            self._take(message)
        self._tell_beats()
        if self._drain_deadline is None and self._signals:
            return self._begin_drain()
        if self._drain_deadline is not None:
            return self._drained()
        return self._check()

    @staticmethod
    def _swallow(wakeup: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            wakeup.recv(4096)

    def _take(self, message: Report) -> None:
        self._last_beat[message.process] = time.monotonic()
        if isinstance(message, PhaseReport):
            self._api.send(message)
            self._log_phase(message.process, message.phase)
        elif isinstance(message, ProcessFailed):
            self._failures[message.process] = message.message
        elif isinstance(message, Ready):
            self._ready[message.process] = message
            log.event("process_ready", process=message.process, seconds=self._elapsed())
            if not self._serving and len(self._ready) == len(self._children.running):
                self._begin_serving()

    def _log_phase(self, process: str, phase: str) -> None:
        """Log a phase as it begins; what else is reported of it is progress. Of the last, ``process_ready`` tells."""
        if phase not in (self._phases.get(process), PHASES[-1]):
            self._phases[process] = phase
            log.event("phase_started", process=process, phase=phase, seconds=self._elapsed())

    def _elapsed(self) -> float:
        """Seconds since the service's start."""
        return time.monotonic() - self._started

    def _tell_beats(self) -> None:
        """Let the api process know, once a turn's length, when each process was last heard of."""
        now = time.monotonic()
        if now - self._told_beats < TURN_SECONDS:
            return
        self._told_beats = now
        running = set(self._children.running)
        self._api.send(
            ProcessHealth(
                processes=list(self._last_beat),
                ages=[now - beat for beat in self._last_beat.values()],
                running=[name in running for name in self._last_beat],
            )
        )

    def _begin_serving(self) -> None:
        self._serving = True
        tokens = min(ready.kv_tokens for name, ready in self._ready.items() if name.startswith(Role.RANK))
        self._api.send(ServiceReady(kv_tokens=tokens))
        host, port = self._config.host, self._ready[_API].port
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        log.event("service_ready", url=url, kv_tokens=tokens, seconds=self._elapsed())

    def _check(self) -> int | None:
        """Fail when a child has ended, is silent or late."""
        ended = self._children.reap()
        if ended:
            return self._fail_after(ended)
        now = time.monotonic()
        limit = self._config.heartbeat_timeout_seconds
        for name in self._ready:
            if now - self._last_beat[name] > limit:
                return self._fail(
                    f"{name} has been silent for {limit:g} s, which --heartbeat-timeout-seconds allows at most"
                )
        if not self._serving and now - self._started > self._config.startup_timeout_seconds:
            late = [name for name in self._children.running if name not in self._ready]
            return self._fail(
                f"not ready within {self._config.startup_timeout_seconds:g} s: {', '.join(late)}"
            )
        return None

    def _fail_after(self, ended: list[Ended]) -> int:
        """Fail for children that have ended, with what they said themselves."""
        for message in self._inbox.drain(1024):
            self._take(message)
        said = ((each, self._failures.get(each.name)) for each in ended)
        return self._fail("; ".join(f"{each}: {why}" if why else str(each) for each, why in said))

    def _fail(self, reason: str) -> int:
        """Let the api process tell its clients, then end everything."""
        log.error("service_failed", reason=reason)
        for name in self._children.running:
            if name != _API:
                self._children.kill(name)
        if _API in self._children.running:
            self._api.send(
                ServiceFailed(message=f"the service failed ({reason}) and restarts; retry shortly")
            )
        self._children.wait(FAILURE_GRACE_SECONDS)
        return EXIT_CHILD_DIED if self._serving else EXIT_STARTUP_FAILED

    def _begin_drain(self) -> int | None:
        if not self._serving:
            log.event("service_stopped", reason="signal during start")
            return EXIT_OK
        timeout = self._config.drain_timeout_seconds
        log.event("drain_started", timeout_seconds=timeout)
        self._drain_deadline = time.monotonic() + timeout + DRAIN_MARGIN_SECONDS
        self._api.send(Drain(timeout_seconds=timeout))
        return None

    def _drained(self) -> int | None:
        """The api process ends by itself once its last request has; any other end is a failure."""
        assert self._drain_deadline is not None
        ended = self._children.reap()
        if any(each.name == _API and each.code == EXIT_OK for each in ended):
            log.event("service_stopped", reason="drained")
            return EXIT_OK
        if ended:
            return self._fail_after(ended)
        if self._signals > 1 or time.monotonic() > self._drain_deadline:
            return self._fail("the drain was cut short" if self._signals > 1 else "the drain took too long")
        return None
