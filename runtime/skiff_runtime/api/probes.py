"""Probes and what operators ask: /livez /readyz /startupz /health_generate /metrics /server_info /v1/models."""

import asyncio
import dataclasses
import time
from collections.abc import Callable
from typing import Any, Final

from skiff_runtime import __version__
from skiff_runtime.api.body import Receive, Scope
from skiff_runtime.api.dispatcher import Dispatcher
from skiff_runtime.api.flight import Caller
from skiff_runtime.api.generate import GenerateFormat
from skiff_runtime.api.generation import Generation, ServedModel
from skiff_runtime.api.reply import JSON, reply, reply_error
from skiff_runtime.api.sinks import NullSink
from skiff_runtime.api.sse import encode_json
from skiff_runtime.api.status import ServiceStatus, State
from skiff_runtime.api.writer import Send
from skiff_runtime.errors import InternalError, RequestError, Unavailable
from skiff_runtime.launch import Launch
from skiff_runtime.messages import (
    Finish,
    RequestFailed,
    SamplingParams,
    TextLogprobs,
    TextOptions,
    Usage,
)
from skiff_runtime.metrics import Metrics

HEALTH_TIMEOUT_SECONDS: Final = 30.0
Reply = tuple[int, bytes]


class SimpleEndpoint:
    """An ASGI application for a GET that is answered at once. ``handler`` gives status and body, or raises ``RequestError``."""

    def __init__(self, handler: Callable[[Scope], Reply], *, content_type: str = JSON) -> None:
        self._handler = handler
        self._content_type = content_type

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            status, body = self._handler(scope)
            await reply(scope, send, status, body, self._content_type)
        except RequestError as error:
            await reply_error(scope, send, error)


class Probes:
    """Handlers that tell where the service stands."""

    def __init__(self, launch: Launch, model: ServedModel, status: ServiceStatus, metrics: Metrics) -> None:
        self._launch = launch
        self._model = model
        self._status = status
        self._metrics = metrics
        self._created = int(time.time())

    def livez(self, _scope: Scope) -> Reply:
        """200 until the service fails: the supervisor ends every process when one of them does not beat."""
        return _told(self._status.state is not State.FAILED, {"status": self._status.state})

    def readyz(self, _scope: Scope) -> Reply:
        """200 while new requests are served."""
        return _told(self._status.state is State.READY, {"status": self._status.state})

    def startupz(self, _scope: Scope) -> Reply:
        """200 once every process is ready; the body tells each one's phase and progress."""
        return _told(self._status.state in (State.READY, State.DRAINING), self._status.report())

    def metrics(self, _scope: Scope) -> Reply:
        """Prometheus' text format."""
        return 200, self._metrics.page()

    def server_info(self, _scope: Scope) -> Reply:
        """Version, model, configuration, capacity and start."""
        model = {
            field: value
            for field, value in dataclasses.asdict(self._launch.model).items()
            if isinstance(value, str | int | float | list | tuple)
        }
        info = {
            "version": __version__,
            "status": self._status.state,
            "model": {"name": self._model.name, **model},
            "config": self._launch.config.shown(),
            "kv_tokens": self._status.kv_tokens,
            "start_phase_seconds": self._status.phase_seconds(),
        }
        return 200, encode_json(info)

    def models(self, _scope: Scope) -> Reply:
        """OpenAI's list of models."""
        return 200, encode_json({"object": "list", "data": [self._card()]})

    def one_model(self, scope: Scope) -> Reply:
        """One entry of that list."""
        self._model.check_name(scope["path_params"]["name"])
        return 200, encode_json(self._card())

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "skiff",
            "max_model_len": self._model.max_model_len,
        }


class HealthEndpoint:
    """GET /health_generate: one real token through every process. Whoever asks meanwhile waits for the same one."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._check: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        began = time.perf_counter()
        if self._check is None or self._check.done():
            self._check = asyncio.get_running_loop().create_task(self._one_token())
        try:
            await asyncio.shield(self._check)
        except RequestError as error:
            await reply_error(scope, send, error)
            return
        seconds = round(time.perf_counter() - began, 6)
        await reply(scope, send, 200, encode_json({"status": "ok", "seconds": seconds}))

    async def _one_token(self) -> None:
        sink = _HealthSink()
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
        generation = Generation(
            prompts=[[0]], sampling=sampling, text=TextOptions(), reply=GenerateFormat(), stream=False
        )
        flight = self._dispatcher.submit(generation, [sink], Caller(request_id="health", endpoint=None))
        try:
            await asyncio.wait_for(sink.ended, HEALTH_TIMEOUT_SECONDS)
        except TimeoutError:
            raise Unavailable(f"no token within {HEALTH_TIMEOUT_SECONDS:g} s") from None
        finally:
            self._dispatcher.abort(flight)


class _HealthSink(NullSink):
    """Waits for the end of a request."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(
        self, text: str, token: int, logprobs: TextLogprobs | None, finish: Finish, usage: Usage
    ) -> None:
        self._end(None if usage.completion_tokens else InternalError("the request ended without a token"))

    def fail(self, error: RequestFailed) -> None:
        self._end(InternalError(error.message))

    def _end(self, error: RequestError | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)


def _told(good: bool, value: dict[str, Any]) -> Reply:
    return (200 if good else 503), encode_json(value)
