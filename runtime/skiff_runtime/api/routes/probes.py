"""GET operations: probes (/livez /readyz /startupz /health_generate), /metrics, /server_info and /v1/models."""

import asyncio
import dataclasses
import time
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Response
from pydantic import BaseModel

from skiff_runtime import __version__, contract
from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.request_state import RequestMetadata
from skiff_runtime.api.dispatch.response_writers import NullChoiceWriter
from skiff_runtime.api.dispatch.service_status import ServiceStatus, State
from skiff_runtime.api.formats.generate import GenerateResponseFormatter
from skiff_runtime.api.formats.request_spec import RequestSpec
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.routes.openapi import failures, text, unready
from skiff_runtime.errors import InternalError, RequestError, Unavailable
from skiff_runtime.messages import (
    FinishReason,
    RequestFailed,
    SamplingSpec,
    TextLogprobs,
    TextOptions,
    Usage,
)
from skiff_runtime.metrics.definitions import Metrics
from skiff_runtime.metrics.exposition import MetricsExposition
from skiff_runtime.processes.launch import Launch

HEALTH_CHECK_TIMEOUT_SECONDS: Final = 30.0


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """All served models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class StatusResponse(BaseModel):
    """The state of the service."""

    status: State


class StartupResponse(StatusResponse):
    """Progress of the start: each process's phase, its progress from 0 to 1, and its phases' seconds."""

    elapsed_seconds: float
    processes: dict[str, dict[str, Any]]


class HealthResponse(BaseModel):
    """One token was generated in this many seconds."""

    status: Literal["ok"]
    seconds: float


class ServerInfo(BaseModel):
    """Version, model, configuration (secrets left out), capacity and start."""

    version: str
    status: State
    model: dict[str, Any]
    config: dict[str, Any]
    kv_tokens: int
    start_phase_seconds: dict[str, float]


def make_probe_routes(status: ServiceStatus, dispatcher: Dispatcher, metrics: Metrics) -> APIRouter:
    """Return the operations of kubelets, scrapers and routers."""
    router = APIRouter(tags=["probes"])
    health = _HealthCheck(dispatcher)
    page = MetricsExposition(metrics)

    @router.get(contract.PATH_LIVEZ, summary="Alive?", responses=unready(StatusResponse))
    async def livez(response: Response) -> StatusResponse:
        """200 until the service fails: the supervisor ends every process when one of them does not beat."""
        _set_status(response, good=status.state is not State.FAILED)
        return StatusResponse(status=status.state)

    @router.get(contract.PATH_READYZ, summary="Ready?", responses=unready(StatusResponse))
    async def readyz(response: Response) -> StatusResponse:
        """200 while new requests are served."""
        _set_status(response, good=status.state is State.READY)
        return StatusResponse(status=status.state)

    @router.get(contract.PATH_STARTUPZ, summary="Started?", responses=unready(StartupResponse))
    async def startupz(response: Response) -> StartupResponse:
        """200 once every process is ready; the body has the phase and the progress of each."""
        _set_status(response, good=status.state in (State.READY, State.DRAINING))
        return StartupResponse(**status.report())

    @router.get(
        contract.PATH_HEALTH_GENERATE, summary="Generate one token", responses=failures(429, 500, 503)
    )
    async def health_generate() -> HealthResponse:
        """One real token through every process. Checks that come meanwhile wait for the same one."""
        began = time.perf_counter()
        await health.run()
        return HealthResponse(status="ok", seconds=round(time.perf_counter() - began, 6))

    @router.get(
        contract.PATH_METRICS,
        summary="Metrics",
        response_class=Response,
        responses=text("text/plain", "application/openmetrics-text"),
    )
    async def read_metrics(accept: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
        """Prometheus' text format, or OpenMetrics where the header Accept names it."""
        content, content_type = page.read(accept)
        return Response(content, headers={"content-type": content_type})

    return router


def make_server_info_routes(launch: Launch, model: ServedModel, status: ServiceStatus) -> APIRouter:
    """Return the operations that describe the service."""
    router = APIRouter(tags=["service"])
    card = ModelCard(
        id=model.name,
        object="model",
        created=int(time.time()),
        owned_by="skiff",
        max_model_len=model.max_model_len,
    )

    @router.get(contract.PATH_MODELS, summary="List the served model")
    async def models() -> ModelList:
        """OpenAI's list of models."""
        return ModelList(object="list", data=[card])

    @router.get(
        contract.PATH_MODELS + "/{name:path}", summary="Show the served model", responses=failures(404)
    )
    async def one_model(name: str) -> ModelCard:
        """One entry of that list."""
        model.check_model_name(name)
        return card

    @router.get(contract.PATH_SERVER_INFO, summary="Show version and configuration")
    async def server_info() -> ServerInfo:
        """Version, model, configuration, capacity and start."""
        described = {
            field: value
            for field, value in dataclasses.asdict(launch.model).items()
            if isinstance(value, str | int | float | list | tuple)
        }
        return ServerInfo(
            version=__version__,
            status=status.state,
            model={"name": model.name, **described},
            config=launch.config.public_fields(),
            kv_tokens=status.kv_tokens,
            start_phase_seconds=status.phase_seconds(),
        )

    return router


def _set_status(response: Response, *, good: bool) -> None:
    response.status_code = 200 if good else 503


class _HealthCheck:
    """Generates one token, the same one for all that ask at a time."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._check: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Wait for a token. Raises ``RequestError``."""
        if self._check is None or self._check.done():
            self._check = asyncio.get_running_loop().create_task(self._one_token())
        await asyncio.shield(self._check)

    async def _one_token(self) -> None:
        sink = _HealthSink()
        sampling = SamplingSpec(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
        generation = RequestSpec(
            prompts=[[0]],
            sampling=sampling,
            text=TextOptions(),
            formatter=GenerateResponseFormatter(),
            stream=False,
        )
        flight = self._dispatcher.submit(
            generation, [sink], RequestMetadata(request_id="health", endpoint=None)
        )
        try:
            await asyncio.wait_for(sink.ended, HEALTH_CHECK_TIMEOUT_SECONDS)
        except TimeoutError:
            raise Unavailable(f"no token within {HEALTH_CHECK_TIMEOUT_SECONDS:g} s") from None
        finally:
            self._dispatcher.abort(flight)


class _HealthSink(NullChoiceWriter):
    """Waits for the end of a request."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def finish(
        self, text: str, token: int, logprobs: TextLogprobs | None, finish: FinishReason, usage: Usage
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
