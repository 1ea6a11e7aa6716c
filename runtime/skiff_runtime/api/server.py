"""The API process: listens while the model still loads, serves, drains, and tells every client how its request ended."""

import asyncio
import contextlib
import gc
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

import uvicorn
import uvloop

from skiff_runtime import log
from skiff_runtime.api.app import build_app
from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.rpc import RpcClient
from skiff_runtime.api.dispatch.service_status import ServiceStatus, State
from skiff_runtime.api.dispatch.tracing import RequestTracer
from skiff_runtime.api.http.protocol import EXTRA_PROBE_CONNECTIONS, HttpServerConfig
from skiff_runtime.errors import ConfigError, InternalError, SkiffError, Unavailable
from skiff_runtime.messages import (
    Decoded,
    Drain,
    Encoded,
    PhaseReport,
    ProcessHealth,
    RequestFailed,
    ServiceFailed,
    ServiceReady,
    TextBatch,
    ToApi,
)
from skiff_runtime.messages.transport import Receiver, Sender
from skiff_runtime.metrics.definitions import Metrics
from skiff_runtime.metrics.labels import AbortReason
from skiff_runtime.processes.child_process import Child

LISTEN_BACKLOG: Final = 2048
KEEP_ALIVE_SECONDS: Final = 75
"""Longer than the idle limit of common load balancers, so that it is they who close idle connections."""
RESERVED_FILE_DESCRIPTORS: Final = EXTRA_PROBE_CONNECTIONS + 64
"""File descriptors that are not clients' connections: sockets between processes, and what probes come on."""
TICK_SECONDS: Final = 0.25
MAX_MESSAGES_PER_TURN: Final = 64
FAILURE_LINGER_SECONDS: Final = 0.5
"""How long new clients are still told that the service failed."""
FAILURE_CLOSE_SECONDS: Final = 1
DRAIN_LINGER_SECONDS: Final = 1.0
"""How long clients that have not noticed the drain yet are still told to go elsewhere, instead of being cut off."""
DRAIN_CLOSE_SECONDS: Final = 2
"""How long slow readers may take for what is already written."""

ApiMessage = (
    TextBatch
    | RequestFailed
    | Encoded
    | Decoded
    | PhaseReport
    | ProcessHealth
    | ServiceReady
    | Drain
    | ServiceFailed
)


class _HttpServer(uvicorn.Server):
    """uvicorn, but signals are the supervisor's business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ApiServer:
    """One API process."""

    def __init__(self, child: Child) -> None:
        self._child = child
        config = child.launch.config
        self._status = ServiceStatus()
        self._metrics = Metrics(
            in_flight=lambda: len(self._dispatcher),
            ready=lambda: self._status.state is State.READY,
            connections=lambda: len(self._http.server_state.connections),
            phase_seconds=self._status.phase_seconds,
            heartbeats=self._status.heartbeats,
        )
        self._tracer = _tracer(child)
        tokenizers = [
            Sender(child.endpoints.tokenizer(index)) for index in range(max(1, config.tokenizer_worker_num))
        ]
        self._dispatcher = Dispatcher(
            tokenizers,
            capacity=config.running_limit + config.max_queued_requests,
            status=self._status,
            metrics=self._metrics,
            on_end=None if self._tracer is None else self._tracer.record,
        )
        self._queries = RpcClient(tokenizers, self._status)
        self._inbox: Receiver[ApiMessage] = Receiver(child.endpoints.api, ToApi)
        self._http = self._make_http()
        self._error: BaseException | None = None
        self._ending: asyncio.Task[None] | None = None

    def _make_http(self) -> _HttpServer:
        app = build_app(
            self._child.launch, self._status, self._dispatcher, queries=self._queries, metrics=self._metrics
        )
        return _HttpServer(
            HttpServerConfig(
                app,
                max_connections=min(self._child.launch.config.max_connections, raise_file_limit()),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=LISTEN_BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=DRAIN_CLOSE_SECONDS,
            )
        )

    async def serve(self) -> None:
        """Serve until drained, failed or broken; re-raises what broke the reader."""
        config = self._child.launch.config
        listener = listen(config.host, config.port)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._callback_failed)
        loop.add_reader(self._inbox.socket.fileno(), self._guarded, self._read)
        ticker = loop.create_task(self._tick())
        port = listener.getsockname()[1]
        log.event("listening", host=config.host, port=port)
        self._child.report_phase("ready")
        self._child.report_ready(port=port)
        try:
            await self._http.serve(sockets=[listener])
        finally:
            ticker.cancel()
            loop.remove_reader(self._inbox.socket.fileno())
            if self._tracer is not None:
                self._tracer.close()
        if self._error is not None:
            raise self._error

    async def _tick(self) -> None:
        """Beat, and read too: a ZeroMQ descriptor tells of a change once, not of what is left."""
        while True:
            self._guarded(self._child.beat)
            self._guarded(self._read)
            if self._child.should_stop:
                self._begin_drain(self._child.launch.config.drain_timeout_seconds)
            await asyncio.sleep(TICK_SECONDS)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a callback; the boundary where its error ends the process instead of being logged and forgotten."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 (re-raised by serve)
            self._error = error
            self._http.should_exit = True

    def _callback_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A timer's callback found that another process does not read: that ends this one, too."""
        error = context.get("exception")
        if isinstance(error, SkiffError):
            self._error = error
            self._http.should_exit = True
        else:
            loop.default_exception_handler(context)

    def _read(self) -> None:
        messages = self._inbox.drain(MAX_MESSAGES_PER_TURN)
        for message in messages:
            self._take(message)
        if len(messages) == MAX_MESSAGES_PER_TURN:
            asyncio.get_running_loop().call_soon(self._guarded, self._read)

    def _take(self, message: ApiMessage) -> None:
        match message:
            case TextBatch():
                self._dispatcher.deliver(message)
                for flushed in message.flushed:
                    self._queries.answer(flushed)
            case RequestFailed():
                self._dispatcher.fail(message)
                self._queries.fail(message)
            case Encoded() | Decoded():
                self._queries.answer(message)
            case PhaseReport():
                self._status.note(message)
            case ProcessHealth():
                self._status.record_heartbeats(message)
            case ServiceReady():
                self._metrics.record_kv_capacity(message.kv_tokens, self._child.launch.config.page_size)
                self._status.mark_ready(message.kv_tokens)
            case Drain():
                self._begin_drain(message.timeout_seconds)
            case ServiceFailed():
                self._begin_failure(message.message)

    def _begin_drain(self, timeout_seconds: float) -> None:
        if self._status.state in (State.STARTING, State.READY):
            self._status.state = State.DRAINING
            log.event("draining", in_flight=len(self._dispatcher), timeout_seconds=timeout_seconds)
            self._ending = asyncio.get_running_loop().create_task(self._drain(timeout_seconds))

    async def _drain(self, timeout_seconds: float) -> None:
        if not await self._dispatcher.idle(timeout_seconds):
            log.warning("drain_timed_out", cut_short=len(self._dispatcher))
            self._dispatcher.fail_all(
                Unavailable(
                    "the service shut down before the request was finished; retry with another replica"
                ),
                AbortReason.DRAIN,
            )
        await asyncio.sleep(DRAIN_LINGER_SECONDS)
        self._http.should_exit = True

    def _begin_failure(self, message: str) -> None:
        if self._status.state is not State.FAILED:
            self._status.state = State.FAILED
            self._dispatcher.fail_all(InternalError(message))
            self._queries.fail_all(InternalError(message))
            self._ending = asyncio.get_running_loop().create_task(self._end_failed())

    async def _end_failed(self) -> None:
        await asyncio.sleep(FAILURE_LINGER_SECONDS)
        self._http.config.timeout_graceful_shutdown = FAILURE_CLOSE_SECONDS
        self._http.should_exit = True


def _tracer(child: Child) -> RequestTracer | None:
    config = child.launch.config
    if config.otlp_traces_endpoint is None:
        return None
    return RequestTracer(config.otlp_traces_endpoint, config.served_model_name or "")


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket. Raises ``ConfigError`` that says which address is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another --host or --port"
        ) from None


def raise_file_limit() -> int:
    """Allow as many open connections as the system lets this process have; how many that are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(1, hard - RESERVED_FILE_DESCRIPTORS)


def run(child: Child) -> None:
    """Main function of the API process."""
    gc.collect()  # of the imports, so that the application takes the memory of their garbage: 0.5 MiB
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ApiServer(child).serve())
