"""Probes (/livez, /readyz, /startupz, /health_generate, and /health and /ping) and /metrics, for kubelets and scrapers."""

import asyncio
import time
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Response
from pydantic import BaseModel

from skiff_runtime import contract
from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.request_state import RequestMetadata
from skiff_runtime.api.dispatch.response_writers import NullChoiceWriter
from skiff_runtime.api.dispatch.service_status import ServiceState, ServiceStatus
from skiff_runtime.api.formats.generate import GenerateResponseFormatter
from skiff_runtime.api.formats.request_spec import RequestSpec
from skiff_runtime.api.routes.openapi import error_responses, not_ready_response, text_response
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

HEALTH_CHECK_TIMEOUT_SECONDS: Final = 30.0


class StatusResponse(BaseModel):
    """The state of the service."""

    status: ServiceState


class StartupResponse(StatusResponse):
    """Progress of the start: each process's phase, its progress from 0 to 1, and the seconds of its earlier phases."""

    elapsed_seconds: float
    processes: dict[str, dict[str, Any]]


class HealthResponse(BaseModel):
    """Seconds in which one token was generated."""

    status: Literal["ok"]
    seconds: float


def make_probe_routes(status: ServiceStatus, dispatcher: Dispatcher, metrics: Metrics) -> APIRouter:
    """Return the probes and the metrics page."""
    router = APIRouter(tags=["probes"])
    health = _HealthCheck(dispatcher)
    page = MetricsExposition(metrics)

    @router.get(contract.PATH_LIVEZ, summary="Liveness", responses=not_ready_response(StatusResponse))
    async def livez(response: Response) -> StatusResponse:
        """Return 200 until the service fails: the supervisor ends every process if one of them sends no heartbeat."""
        _set_status(response, ok=status.state is not ServiceState.FAILED)
        return StatusResponse(status=status.state)

    @router.get(contract.PATH_READYZ, summary="Readiness", responses=not_ready_response(StatusResponse))
    async def readyz(response: Response) -> StatusResponse:
        """Return 200 while the service accepts new requests."""
        _set_status(response, ok=status.state is ServiceState.READY)
        return StatusResponse(status=status.state)

    @router.get(contract.PATH_STARTUPZ, summary="Startup", responses=not_ready_response(StartupResponse))
    async def startupz(response: Response) -> StartupResponse:
        """Return 200 once every process is ready; the body has each process's phase and progress."""
        _set_status(response, ok=status.state in (ServiceState.READY, ServiceState.DRAINING))
        return StartupResponse(**status.startup_report())

    @router.get(contract.PATH_HEALTH, summary="Readiness", responses=not_ready_response(StatusResponse))
    @router.get(contract.PATH_PING, summary="Readiness", responses=not_ready_response(StatusResponse))
    @router.post(contract.PATH_PING, summary="Readiness", responses=not_ready_response(StatusResponse))
    async def health_check(response: Response) -> StatusResponse:
        """Return the same as /readyz, at the paths that vLLM and SGLang, and Amazon SageMaker, have for it."""
        return await readyz(response)

    @router.get(
        contract.PATH_HEALTH_GENERATE, summary="Generate one token", responses=error_responses(429, 500, 503)
    )
    async def health_generate() -> HealthResponse:
        """Generate one token through every process. Checks that arrive meanwhile wait for the same token."""
        began = time.perf_counter()
        await health.run()
        return HealthResponse(status="ok", seconds=round(time.perf_counter() - began, 6))

    @router.get(
        contract.PATH_METRICS,
        summary="Metrics",
        response_class=Response,
        responses=text_response("text/plain", "application/openmetrics-text"),
    )
    async def read_metrics(accept: Annotated[str, Header(include_in_schema=False)] = "") -> Response:
        """Return the metrics in Prometheus' text format, or in OpenMetrics if the Accept header asks for it."""
        content, content_type = page.read(accept)
        return Response(content, headers={"content-type": content_type})

    return router


def _set_status(response: Response, *, ok: bool) -> None:
    response.status_code = 200 if ok else 503


class _HealthCheck:
    """Generates one token, shared by all checks that run at a time."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._check: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Wait until a token was generated. Raises ``RequestError``."""
        if self._check is None or self._check.done():
            self._check = asyncio.get_running_loop().create_task(self._generate_token())
        await asyncio.shield(self._check)  # the other checks go on if this one's client disconnects

    async def _generate_token(self) -> None:
        writer = _HealthCheckWriter()
        sampling = SamplingSpec(max_tokens=1, seed=0, temperature=0.0, ignore_eos=True)
        spec = RequestSpec(
            prompts=[[0]],
            sampling=sampling,
            text=TextOptions(),
            formatter=GenerateResponseFormatter(),
            stream=False,
        )
        request = self._dispatcher.submit(spec, [writer], RequestMetadata(request_id="health", endpoint=None))
        try:
            await asyncio.wait_for(writer.ended, HEALTH_CHECK_TIMEOUT_SECONDS)
        except TimeoutError:
            raise Unavailable(f"no token within {HEALTH_CHECK_TIMEOUT_SECONDS:g} s") from None
        finally:
            self._dispatcher.abort(request)


class _HealthCheckWriter(NullChoiceWriter):
    """Waits for the end of the check's request. ``ended``: raises ``InternalError`` if it failed."""

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
