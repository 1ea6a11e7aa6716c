"""The API process: listens while the model still loads, serves, drains, and ends every request with a response."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any, Final

import uvloop

from skiff_runtime import log
from skiff_runtime.api.app import build_app
from skiff_runtime.api.dispatch.adapter_manager import AdapterManager
from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.kv_event_publisher import make_kv_event_publisher
from skiff_runtime.api.dispatch.rpc import RpcClient
from skiff_runtime.api.dispatch.service_status import ServiceState, ServiceStatus
from skiff_runtime.api.dispatch.state_stream import StateStream
from skiff_runtime.api.dispatch.tracing import RequestTracer
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.http.auth import AccessPolicy
from skiff_runtime.api.http.http_server import HttpServer, make_http_server
from skiff_runtime.api.http.key_file import KeyFile
from skiff_runtime.api.http.late_requests import wait_until_over
from skiff_runtime.api.http.listener import listen
from skiff_runtime.config import Config
from skiff_runtime.errors import UNEXPECTED_ERROR, InternalError, SkiffError, Unavailable
from skiff_runtime.messages import (
    AdapterRefused,
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
from skiff_runtime.metrics.vllm_names import VllmNames
from skiff_runtime.processes.child_process import Child

TICK_SECONDS: Final = 0.25
MAX_MESSAGES_PER_TURN: Final = 64
FAILURE_LINGER_SECONDS: Final = 0.5
"""Time during which new clients still get an error response after a failure."""
FAILURE_CLOSE_SECONDS: Final = 1
DRAIN_LINGER_SECONDS: Final = 1.0
"""Shortest drain: clients that have not noticed it yet get a 503 instead of a refused connection."""
DRAIN_REPORT_SECONDS: Final = 10.0
DRAIN_CLOSE_SECONDS: Final = 2
"""Time that slow clients have to read what is already written."""

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


class ApiServer:
    """The API process: its HTTP server, and the reader of messages from the other processes."""

    def __init__(self, child: Child) -> None:
        self._child = child
        config = child.launch.config
        self._status = ServiceStatus()
        self._metrics = Metrics(
            vllm_names=_make_vllm_names(config),
            in_flight=lambda: len(self._dispatcher),
            ready=lambda: self._status.state is ServiceState.READY,
            connections=lambda: len(self._http.server_state.connections),
            phase_seconds=self._status.phase_seconds,
            heartbeats=self._status.heartbeats,
            max_loras=config.max_loras if config.enable_lora else 0,
            num_adapters=lambda: len(self._adapters),
            adapter_names=lambda ids: self._adapters.find_names(ids),
        )
        self._tracer = _make_tracer(child)
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
        self._rpc = RpcClient(tokenizers, self._status)
        self._model = ServedModel.from_launch(child.launch)
        self._adapters = AdapterManager(
            config,
            self._model,
            child.launch.adapters,
            rpc=self._rpc,
            dispatcher=self._dispatcher,
            scheduler=tokenizers[0],
        )
        self._publisher = make_kv_event_publisher(config)
        self._events = StateStream(
            config,
            self._status,
            tokenizers,
            in_flight=lambda: len(self._dispatcher),
            prompt_bytes=self._dispatcher.prompt_bytes,
            publisher=self._publisher,
            adapters=self._adapters.describe if config.enable_lora else None,
        )
        self._inbox: Receiver[ApiMessage] = Receiver(child.endpoints.api, ToApi)
        self._access = AccessPolicy.from_config(config)
        self._http = self._make_http()
        self._error: BaseException | None = None
        self._ending: asyncio.Task[None] | None = None

    def _make_http(self) -> HttpServer:
        app = build_app(
            self._child.launch,
            self._status,
            self._dispatcher,
            rpc=self._rpc,
            metrics=self._metrics,
            events=self._events,
            access=self._access,
            model=self._model,
            adapters=self._adapters,
        )
        return make_http_server(
            app, max_connections=self._child.launch.config.max_connections, close_seconds=DRAIN_CLOSE_SECONDS
        )

    async def serve(self) -> None:
        """Serve until the service has drained or failed. Re-raises an error of the reader or of a callback."""
        config = self._child.launch.config
        listener = listen(config.host, config.port)
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._handle_callback_error)
        loop.add_reader(self._inbox.socket.fileno(), self._guarded, self._read)
        if self._publisher is not None:
            self._publisher.answer_replays(loop)
        tasks = [loop.create_task(self._tick())]
        tasks += [loop.create_task(self._watch_keys(file)) for file in self._access.key_files]
        port = listener.getsockname()[1]
        log.event("listening_started", host=config.host, port=port)
        self._child.report_phase("ready")
        self._child.report_ready(port=port)
        try:
            await self._http.serve(sockets=[listener])
        finally:
            for task in tasks:
                task.cancel()
            loop.remove_reader(self._inbox.socket.fileno())
            if self._publisher is not None:
                self._publisher.close()
            if self._tracer is not None:
                self._tracer.close()
        if self._error is not None:
            raise self._error

    async def _tick(self) -> None:
        """Send heartbeats, read messages, and notice the signal to stop, every ``TICK_SECONDS``."""
        while True:
            self._guarded(self._child.beat)
            # ZeroMQ's descriptor signals a change once, not that messages are left, so a wake-up can be missed.
            self._guarded(self._read)
            if self._child.should_stop:
                self._begin_drain(self._child.launch.config.drain_timeout_seconds)
            await asyncio.sleep(TICK_SECONDS)

    async def _watch_keys(self, file: KeyFile) -> None:
        """Keep the keys of a file in force. An error ends the process, because later changes would be missed."""
        try:
            await file.watch(lambda success: self._metrics.record_key_reload(file.flag, success=success))
        except Exception as error:  # noqa: BLE001 (re-raised by serve)
            self._fail(error)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Run a callback. An error in it ends the process; asyncio would only log it.

        Results that the callback had not delivered are lost, so each request in flight ends with an error, and nothing more is
        delivered: an answer must not have gaps.
        """
        if self._error is not None:
            return
        try:
            step()
        except Exception as error:  # noqa: BLE001 (re-raised by serve)
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Begin the end of this process by an error of its own, which ``serve`` raises."""
        self._error = error
        self._http.should_exit = True
        self._fail_requests(UNEXPECTED_ERROR)

    def _fail_requests(self, message: str) -> None:
        self._dispatcher.fail_all(InternalError(message))
        self._rpc.fail_all(InternalError(message))

    def _handle_callback_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the process if a timer's callback failed because another process does not read its messages."""
        error = context.get("exception")
        if isinstance(error, SkiffError):
            self._fail(error)
        else:
            loop.default_exception_handler(context)

    def _read(self) -> None:
        messages = self._inbox.drain(MAX_MESSAGES_PER_TURN)
        for message in messages:
            self._handle(message)
        if len(messages) == MAX_MESSAGES_PER_TURN:
            asyncio.get_running_loop().call_soon(self._guarded, self._read)

    def _handle(self, message: ApiMessage) -> None:
        match message:
            case TextBatch():
                if self._events.watches_prompts:
                    self._events.record_opened(message.opened)
                self._dispatcher.deliver(message)
                self._events.record_batch(message)
                for flushed in message.flushed:
                    self._rpc.resolve(flushed)
                for reply in message.adapters:
                    if isinstance(reply, AdapterRefused):
                        self._adapters.leave_out(reply)
                    self._rpc.resolve(reply)
            case RequestFailed():
                self._dispatcher.fail(message)
                self._rpc.fail(message)
            case Encoded() | Decoded():
                self._rpc.resolve(message)
            case PhaseReport():
                self._status.record_phase(message)
            case ProcessHealth():
                self._status.record_heartbeats(message)
            case ServiceReady():
                self._metrics.record_kv_capacity(message.kv_tokens, self._child.launch.config.page_size)
                self._status.mark_ready(message.kv_tokens)
                self._events.flush_now()
                self._child.report_serving()
            case Drain():
                self._begin_drain(message.timeout_seconds)
            case ServiceFailed():
                self._begin_failure(message.message)

    def _begin_drain(self, timeout_seconds: float) -> None:
        if self._status.mark_draining():
            self._events.flush_now()
            log.event("drain_started", in_flight=len(self._dispatcher), timeout_seconds=timeout_seconds)
            self._ending = asyncio.get_running_loop().create_task(self._drain(timeout_seconds))

    async def _drain(self, timeout_seconds: float) -> None:
        """End the connections, refuse requests once no late ones come, and exit when none is in flight or the time is over."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._http.begin_closing()
        elapsed = await wait_until_over(lambda: self._status.late_requests, timeout_seconds=timeout_seconds)
        self._status.refuse_requests()
        log.event("drain_refusing", late_requests=self._status.late_requests, seconds=round(elapsed, 3))
        self._http.close_idle_connections()
        while len(self._dispatcher) and (left := began + timeout_seconds - loop.time()) > 0:
            log.event("drain_waiting", in_flight=len(self._dispatcher), timeout_seconds=round(left, 1))
            await self._dispatcher.wait_until_idle(min(left, DRAIN_REPORT_SECONDS))
        if len(self._dispatcher):
            log.warning("drain_timed_out", aborted=len(self._dispatcher))
            self._dispatcher.fail_all(
                Unavailable("the service shut down before the request finished; retry with another replica"),
                AbortReason.DRAIN,
            )
        log.event("drain_finished", seconds=round(loop.time() - began, 3))
        await asyncio.sleep(began + DRAIN_LINGER_SECONDS - loop.time())
        self._events.close()
        self._http.should_exit = True

    def _begin_failure(self, message: str) -> None:
        if self._status.mark_failed():
            self._events.flush_now()
            self._fail_requests(message)
            self._ending = asyncio.get_running_loop().create_task(self._end_failed())

    async def _end_failed(self) -> None:
        await asyncio.sleep(FAILURE_LINGER_SECONDS)
        self._events.close()
        self._http.config.timeout_graceful_shutdown = FAILURE_CLOSE_SECONDS
        self._http.should_exit = True


def _make_vllm_names(config: Config) -> VllmNames | None:
    return VllmNames(config.served_model_name or "") if "vllm" in config.metrics_names.split(",") else None


def _make_tracer(child: Child) -> RequestTracer | None:
    config = child.launch.config
    if config.otlp_traces_endpoint is None:
        return None
    return RequestTracer(config.otlp_traces_endpoint, config.served_model_name or "")


def run(child: Child) -> None:
    """Run the API process."""
    gc.collect()  # frees the garbage of the imports, so the application reuses its memory: 0.5 MiB
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ApiServer(child).serve())
