"""The supervisor: starts, watches, drains and stops the processes of one service. It is PID 1 of its container.

If any child exits or sends no heartbeat, the api process fails every request and the whole service exits
non-zero: one process cannot be replaced alone, because the others hold state that refers to it. SIGTERM
drains the service, which then exits 0.
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
    PhaseReport,
    ProcessFailed,
    ProcessHealth,
    Ready,
    ServiceFailed,
    ServiceReady,
    Serving,
    ToSupervisor,
)
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender
from skiff_runtime.models.config import ModelConfig
from skiff_runtime.processes.adapter_files import locate_start_adapters
from skiff_runtime.processes.child_process import process_name
from skiff_runtime.processes.children import ChildExit, Children, make_run_dir
from skiff_runtime.processes.heartbeat_monitor import ChildReport, HeartbeatMonitor
from skiff_runtime.processes.launch import Launch, Role
from skiff_runtime.processes.quickstart import Quickstart

TURN_SECONDS: Final = 1.0
FAILURE_GRACE_SECONDS: Final = 2.0
"""Time that the api process has to send every client the failure of the service."""
DRAIN_MARGIN_SECONDS: Final = 5.0
TERMINATE_SECONDS: Final = 5.0
_API: Final = process_name(Role.API, 0)


def serve(config: Config, model: ModelConfig) -> int:
    """Run a service until it stops or fails; return the exit code."""
    adapters = locate_start_adapters(config)
    launch = Launch(config=config, model=model, run_dir=make_run_dir(), adapters=adapters)
    try:
        launch.write()
        return Supervisor(launch).run()
    finally:
        shutil.rmtree(launch.run_dir, ignore_errors=True)


class Supervisor:
    """Supervises the processes of one service."""

    def __init__(self, launch: Launch) -> None:
        self._config = launch.config
        self._generates = not launch.model.embedding_only
        endpoints = Endpoints(launch.run_dir)
        self._inbox: Receiver[ChildReport] = Receiver(endpoints.supervisor, ToSupervisor)
        self._api = Sender(endpoints.api, timeout_seconds=FAILURE_GRACE_SECONDS)
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._children = Children(launch, self._poller)
        self._started = time.monotonic()
        self._heartbeats = HeartbeatMonitor(launch.config)
        self._failures: dict[str, str] = {}
        """Reasons that processes reported for their exit."""
        self._health_sent_at = 0.0
        self._phases: dict[str, str] = {}
        """The start phase that each process last reported."""
        self._ready: dict[str, Ready] = {}
        self._serving = False
        self._signals = 0
        self._drain_deadline: float | None = None

    def run(self) -> int:
        """Start the processes and supervise them until the service ends; return the exit code."""
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
        """Make SIGTERM and SIGINT wake the poller; return the socket that becomes readable."""
        wakeup, sender = socket.socketpair()
        wakeup.setblocking(False)
        sender.setblocking(False)
        signal.set_wakeup_fd(sender.detach())
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._count_signal)
        self._poller.register(wakeup, zmq.POLLIN)
        return wakeup

    def _count_signal(self, _number: int, _frame: object) -> None:
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
        """Run one turn of the main loop; return an exit code once the service has ended."""
        self._poller.poll(int(TURN_SECONDS * 1000))
        self._drain_wakeup(wakeup)
        self._heartbeats.begin_turn()
        for message in self._inbox.drain(1024):
            self._handle(message)
        self._send_health()
        if self._drain_deadline is None and self._signals:
            return self._begin_drain()
        if self._drain_deadline is not None:
            return self._check_drain()
        return self._check_children()

    @staticmethod
    def _drain_wakeup(wakeup: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            wakeup.recv(4096)

    def _handle(self, message: ChildReport) -> None:
        self._heartbeats.record(message)
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
        elif isinstance(message, Serving):
            self._announce()

    def _log_phase(self, process: str, phase: str) -> None:
        """Log the start of a phase; further reports of it are progress. The last phase is logged as ``process_ready``."""
        if phase not in (self._phases.get(process), PHASES[-1]):
            self._phases[process] = phase
            log.event("phase_started", process=process, phase=phase, seconds=self._elapsed())

    def _elapsed(self) -> float:
        """Return the seconds since the service's start."""
        return time.monotonic() - self._started

    def _send_health(self) -> None:
        """Send the ages of the processes' heartbeats to the api process, at most once in ``TURN_SECONDS``."""
        now = time.monotonic()
        if now - self._health_sent_at < TURN_SECONDS:
            return
        self._health_sent_at = now
        running, ages = set(self._children.running), self._heartbeats.ages()
        self._api.send(
            ProcessHealth(
                processes=list(ages),
                ages=list(ages.values()),
                running=[name in running for name in ages],
            )
        )

    def _begin_serving(self) -> None:
        self._serving = True
        self._api.send(ServiceReady(kv_tokens=self._kv_tokens))

    @property
    def _kv_tokens(self) -> int:
        """The KV cache capacity that every rank has."""
        return min(ready.kv_tokens for name, ready in self._ready.items() if name.startswith(Role.RANK))

    def _announce(self) -> None:
        """Log the service's URL, and show what to try.

        The api process accepts requests by now: scripts send them when they read this line.
        """
        host, port = self._config.host, self._ready[_API].port
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        log.event("service_ready", url=url, kv_tokens=self._kv_tokens, seconds=self._elapsed())
        Quickstart(
            host,
            port,
            model=self._config.served_model_name or "",
            keyed=self._config.requires_key,
            generates=self._generates,
        ).show()

    def _check_children(self) -> int | None:
        """Fail if a child has exited, is silent, or is not ready in time."""
        exits = self._children.reap()
        if exits:
            return self._fail_after(exits)
        silence = self._heartbeats.describe_silence(self._ready)
        if silence is not None:
            return self._fail(silence)
        if not self._serving and self._elapsed() > self._config.startup_timeout_seconds:
            late = [name for name in self._children.running if name not in self._ready]
            return self._fail(
                f"not ready within {self._config.startup_timeout_seconds:g} s: {', '.join(late)}"
            )
        return None

    def _fail_after(self, exits: list[ChildExit]) -> int:
        """Fail because children have exited, with the reasons that they reported themselves."""
        # The reasons may still be in the inbox: a child sends its own just before it exits.
        for message in self._inbox.drain(1024):
            self._handle(message)
        reasons = ((each, self._failures.get(each.name)) for each in exits)
        return self._fail("; ".join(f"{each}: {why}" if why else str(each) for each, why in reasons))

    def _fail(self, reason: str) -> int:
        """Let the api process fail all requests, then end every process."""
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

    def _check_drain(self) -> int | None:
        """Return the exit code once the api process has exited, as it does after its last request; None before."""
        assert self._drain_deadline is not None
        exits = self._children.reap()
        if any(each.name == _API and each.code == EXIT_OK for each in exits):
            log.event("service_stopped", reason="drained")
            return EXIT_OK
        if exits:
            return self._fail_after(exits)
        # A drain has a limit of its own; only a silent rank, for which all requests wait, need not be waited for.
        ranks = [name for name in self._children.running if name.startswith(Role.RANK)]
        silence = self._heartbeats.describe_silence(ranks)
        if silence is not None:
            return self._fail(silence)
        if self._signals > 1 or time.monotonic() > self._drain_deadline:
            return self._fail(
                "a second signal cut the drain short" if self._signals > 1 else "the drain took too long"
            )
        return None
