"""The way of a request: its model, the pods of that model, attempts until one of them answers, and exactly one response.

Until the client has a byte of a response, another pod may answer in place of the one that failed: after a refused or lost
connection, a time limit, or a response by which the pod says that it did not begin (429, 503). After that the response
ends with the error, in the shape of its API, and the client decides.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import msgspec

from skiff_router.endpoints import Backend, Endpoint, Registry, Route
from skiff_router.errors import BadGateway, GatewayTimeout
from skiff_router.metering import Meter, Metering
from skiff_router.metrics import RouterMetrics
from skiff_router.pod_state import NO_PROMPT, Prompt
from skiff_router.policies import Policy
from skiff_router.prompts import read_prompt
from skiff_router.relay import REFUSALS, Broken, ClientWriter, Outcome, Relay, Reply, Streamed
from skiff_router.request import (
    MODEL_HEADER,
    RoutedBody,
    read_body,
    read_header_model,
    replace_model,
)
from skiff_router.retries import MAX_ATTEMPTS, RetryBudget
from skiff_router.upstream import Failure, UpstreamConnection, UpstreamError, bearer_line
from skiff_router.waiting_room import WaitingRequest, WaitingRoom
from skiff_runtime import contract, log
from skiff_runtime.api.http.anthropic_errors import ANTHROPIC_PATHS, anthropic_error
from skiff_runtime.api.http.asgi import DISCONNECT_EXTENSION, Receive, Scope, Send
from skiff_runtime.api.http.auth import get_key
from skiff_runtime.api.http.request_body import BodyReader, ClientDisconnected
from skiff_runtime.api.http.request_headers import parse_deadline
from skiff_runtime.api.http.responses import error_body, get_request_id, get_response_headers, send_error
from skiff_runtime.api.http.router_header import ROUTER_HEADER, format_router_header
from skiff_runtime.api.http.usage_header import USAGE_HEADER
from skiff_runtime.errors import (
    CLIENT_CLOSED_REQUEST,
    ModelNotFound,
    RequestError,
    ResponseNotFound,
    Unavailable,
)
from skiff_runtime.sse import encode_event

NO_POD_RETRY_SECONDS: Final = 2
MAX_ROUNDS: Final = 3
"""Times that a request may begin anew when its pods have failed: one that kills each pod must not do so for ever."""
_NOT_FORWARDED: Final = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-request-id",
        MODEL_HEADER,
        ROUTER_HEADER,
        USAGE_HEADER,
    }
)
_REPORT_USAGE: Final = b"%b: 1\r\n" % USAGE_HEADER
_CREDENTIALS: Final = frozenset({b"authorization", b"x-api-key"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """Settings of all requests.

    ``first_byte_seconds``: time limit until the first byte of a response. ``forward_credentials``: the client's API key goes
    to the pod, which checks it; otherwise the pod gets what ``get_backend_key`` returns, or none if that is empty.
    """

    first_byte_seconds: float
    forward_credentials: bool
    get_backend_key: Callable[[], str] = str


class Exchanges:
    """The requests in flight, and the exchanges with each pod, so that those with a pod that hangs can be failed."""

    def __init__(self) -> None:
        self._relays: dict[Endpoint, dict[Relay, UpstreamConnection]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.requests = 0
        self.begun = 0
        """Requests since the start of the router."""

    def begin_request(self) -> None:
        """Count a request whose body is complete."""
        self.requests += 1
        self.begun += 1
        self._idle.clear()

    def end_request(self) -> None:
        """Count the end of a request."""
        self.requests -= 1
        if not self.requests:
            self._idle.set()

    async def wait_until_idle(self, timeout_seconds: float) -> None:
        """Return when no request is in flight, or when the time is over."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_seconds)

    def add(self, endpoint: Endpoint, relay: Relay, connection: UpstreamConnection) -> None:
        """Add an exchange that begins."""
        self._relays.setdefault(endpoint, {})[relay] = connection

    def remove(self, endpoint: Endpoint, relay: Relay) -> None:
        """Remove an exchange that has ended."""
        relays = self._relays[endpoint]
        del relays[relay]
        if not relays:
            del self._relays[endpoint]

    def fail(self, endpoint: Endpoint, reason: str) -> None:
        """Fail every exchange with a pod; those without a first byte are retried on other pods."""
        for relay, connection in list(self._relays.get(endpoint, {}).items()):
            connection.abort(relay)
            relay.on_failure(UpstreamError(Failure.TIMEOUT, reason))


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyContext:
    """The parts of the router that all requests share. ``numbers``: those by which pods acknowledge this router's requests."""

    router_id: str
    registry: Registry
    policy: Policy
    exchanges: Exchanges
    metrics: RouterMetrics
    metering: Metering
    room: WaitingRoom
    settings: ProxySettings
    budget: RetryBudget
    numbers: Iterator[int] = field(default_factory=count)


class Proxy:
    """The ASGI application of the proxied paths."""

    def __init__(self, context: ProxyContext, body: BodyReader) -> None:
        self._context = context
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            # A malformed header is refused as pods refuse it: at once, before the body is read.
            parse_deadline(scope["headers"], 0.0)
            body = await self._body.read(scope, receive)
            meter = self._context.metering.begin(scope, len(body))
        except ClientDisconnected:
            return
        except RequestError as error:
            await _answer_error(self._context.metrics, scope, send, error, model="")
            return
        request = _RoutedRequest(self._context, scope, send, body, meter)
        scope["extensions"][DISCONNECT_EXTENSION].watch(request.abandon)
        self._context.exchanges.begin_request()
        try:
            await request.serve()
        except asyncio.CancelledError:
            if not request.is_abandoned:
                raise
            request.leave()
        finally:
            meter.close()
            self._context.exchanges.end_request()


async def _answer_error(
    metrics: RouterMetrics, scope: Scope, send: Send, error: RequestError, *, model: str
) -> None:
    metrics.record_response(model, error.status)
    log.event("request_rejected", id=get_request_id(scope), status=error.status, error=error.message)
    await send_error(scope, send, error)


class _RoutedRequest:
    """One request and its attempts, served by the task that makes it. ``is_abandoned``: its client has left."""

    def __init__(self, context: ProxyContext, scope: Scope, send: Send, body: bytes, meter: Meter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._is_over = False  # its response is complete, or will never be
        self.is_abandoned = False
        self._meter = meter
        self._relay: Relay | None = None
        self._context = context
        self._scope = scope
        self._send = send
        self._body = body
        self._id = get_request_id(scope)
        self._loop = loop = asyncio.get_running_loop()
        self._began = loop.time()
        self._writer = ClientWriter(scope, send, get_response_headers(scope))
        self._model = ""
        self._service = ""
        self._adapter = ""
        self._prompt = NO_PROMPT
        self._is_canary = False
        self._wants_stream = False
        self._attempts = 0
        self._pod = ""
        self._expected_cached: int | None = None  # tokens; None where the pod's cache is not known

    async def serve(self) -> None:
        """Route the request, and respond."""
        try:
            backend = self._route()
            await self._respond(backend, await self._attempt_when_ready(backend))
        except RequestError as error:
            self._is_over = True
            self._meter.end(error.status, model=self._adapter or self._model, service=self._service)
            if self._writer.has_begun:
                await self._end_events(error_event(self._scope["path"], error, self._id), error.status)
                return
            await _answer_error(self._context.metrics, self._scope, self._send, error, model=self._model)

    def abandon(self) -> None:
        """Cancel the request, whose client has left, unless it is over."""
        if not self._is_over:
            self.is_abandoned = True
            self._task.cancel()

    def leave(self) -> None:
        """Record that the client has left before the end of its response."""
        self._writer.cancel()
        self._finish(CLIENT_CLOSED_REQUEST)

    def _route(self) -> Backend:
        is_native = self._scope["path"] == contract.PATH_GENERATE
        named = read_header_model(self._scope["headers"]) if is_native else ""
        fields = read_body(self._body, model=named)
        route = self._context.registry.find(fields.model)
        backend, self._adapter = route.backend, route.adapter
        self._model, self._service = backend.model, backend.key
        self._prompt = self._read_prompt(fields, route)
        if backend.canary is not None:
            headers = self._scope["headers"]
            self._is_canary = backend.canary.takes(headers, fields, get_key(headers))
        self._wants_stream = fields.wants_stream
        if (fields.model != route.served_name and not is_native) or (is_native and route.adapter):
            self._body = replace_model(self._body, route.served_name)
        return backend

    def _read_prompt(self, fields: RoutedBody, route: Route) -> Prompt:
        settings = self._context.settings
        key = (
            get_key(self._scope["headers"])
            if settings.forward_credentials
            else settings.get_backend_key().encode()
        )
        with_blocks = self._context.policy.reads_blocks
        return read_prompt(fields, route.backend, key, adapter=route.adapter, with_blocks=with_blocks)

    async def _attempt_when_ready(self, backend: Backend) -> Outcome | None:
        """Return the outcome of the last attempt, after waiting for a pod if there is none.

        A request whose pods failed under it before the first byte, and which has none left, waits again.
        """
        waiting: WaitingRequest | None = None
        outcome: Outcome | None = None
        for _ in range(MAX_ROUNDS):
            if self._context.room.must_wait(backend):
                if waiting is None:
                    report = self._report_progress if self._wants_stream else _ignore
                    waiting = WaitingRequest(body_bytes=len(self._body), on_progress=report)
                await self._context.room.wait(backend, waiting)
            self._attempts = 0
            outcome = await self._attempt(backend)
            if not self._is_lost(backend, outcome):
                break
        return outcome

    def _is_lost(self, backend: Backend, outcome: Outcome | None) -> bool:
        """Return whether a request has no pod left, but will have one.

        One failure does not eject a pod, so the only one may be gone although it counts as available.
        """
        if outcome is not None and not self._is_retryable(outcome):
            return False
        if self._context.room.must_wait(backend):
            return True
        failed = isinstance(outcome, Broken) and outcome.error.failure is not Failure.TIMEOUT
        return failed and self._context.room.is_expected(backend) and len(backend.available()) == 1

    def _report_progress(self, text: str) -> None:
        """Write a comment with the progress of the start, which no client takes for an event."""
        if not self._writer.has_begun:
            self._writer.begin_events()
        self._writer.write(b": %b\n\n" % text.encode())

    async def _end_events(self, event: bytes, status: int) -> None:
        """End a stream that has begun while its request waited, with an event in the place of a response."""
        self._writer.write(event)
        await self._writer.end()
        self._finish(status)

    async def _attempt(self, backend: Backend) -> Outcome | None:
        """Return the outcome of the last attempt; None if no pod is available."""
        context = self._context
        context.budget.earn()
        tried: dict[Endpoint, None] = {}
        outcome: Outcome | None = None
        while self._attempts < MAX_ATTEMPTS:
            left = [endpoint for endpoint in backend.available() if endpoint not in tried]
            if not left or (self._attempts and not context.budget.spend()):
                break
            if self._attempts:
                context.metrics.record_retry(self._model)
            self._attempts += 1
            now = self._loop.time()
            left = backend.select_revision(left, canary=self._is_canary)
            if self._adapter:
                left = backend.select_adapter(left, self._adapter)
            endpoint = context.policy.choose(left, self._prompt, now)
            if backend.canary is not None:
                context.metrics.record_canary_choice(self._model, canary=endpoint.name in backend.canary.pods)
            tried[endpoint] = None
            number = next(context.numbers)
            cached = endpoint.pod.record_prompt(now, self._prompt, number)
            is_known = context.policy.reads_blocks and endpoint.pod.load is not None
            self._expected_cached = self._prompt.count_cached_tokens(cached) if is_known else None
            outcome = await self._try(endpoint, number)
            if not self._is_retryable(outcome):
                break
        return outcome

    def _is_retryable(self, outcome: Outcome) -> bool:
        """Return whether another pod may take the request.

        The client has nothing yet, and this pod did not begin, failed, or does not have the adapter.
        """
        match outcome:
            case Broken(begun=begun):
                return not begun
            case Reply(status):
                return status in REFUSALS or self._lacks_adapter(outcome)
            case _:
                return False

    def _lacks_adapter(self, reply: Reply) -> bool:
        """Return whether a pod does not have the adapter of the request, as one that has just started."""
        is_other = ResponseNotFound.code.encode() in reply.body  # what is not found is the previous response
        return bool(self._adapter) and reply.status == ModelNotFound.status and not is_other

    async def _try(self, endpoint: Endpoint, number: int) -> Outcome:
        """Send the request to a pod, wait for the end of its response, and record what that says about the pod."""
        self._pod = endpoint.name
        endpoint.in_flight += 1
        try:
            outcome = await self._exchange_on_any_connection(endpoint, number)
        finally:
            endpoint.in_flight -= 1
            endpoint.pod.forget_request(number)
        if isinstance(outcome, Broken):
            self._context.metrics.record_failure(self._model, outcome.error.failure)
            log.warning(
                "attempt_failed",
                id=self._id,
                pod=endpoint.name,
                failure=outcome.error.failure,
                reason=outcome.error,
                begun=outcome.begun,
                ejected=endpoint.record_failure(),
            )
        elif isinstance(outcome, Reply) and outcome.status == Unavailable.status:
            endpoint.drain()  # it ends, or still loads; a probe brings it back
        else:
            endpoint.record_response()
        return outcome

    async def _exchange_on_any_connection(self, endpoint: Endpoint, number: int) -> Outcome:
        idle = endpoint.pool.take_idle()
        if idle is not None:
            outcome = await self._exchange(endpoint, number, idle)
            if not (isinstance(outcome, Broken) and outcome.error.reused and not outcome.begun):
                return outcome
            # The pod closed the idle connection at the moment at which it was reused.
        try:
            return await self._exchange(endpoint, number, await endpoint.pool.connect())
        except UpstreamError as error:
            return Broken(error, begun=False)

    async def _exchange(self, endpoint: Endpoint, number: int, connection: UpstreamConnection) -> Outcome:
        context = self._context
        self._relay = relay = Relay(self._writer, connection)
        context.exchanges.add(endpoint, relay, connection)
        limit = context.settings.first_byte_seconds
        timer = self._loop.call_later(limit, _expire, relay, connection, limit)
        try:
            connection.send(self._request(endpoint, number), relay)
            outcome = await relay.outcome
            if isinstance(outcome, Streamed):
                await self._writer.end()
            elif isinstance(outcome, Broken) and outcome.begun:
                await self._end_broken(relay, outcome.error)
        except asyncio.CancelledError:
            connection.abort(relay)
            raise
        finally:
            timer.cancel()
            context.exchanges.remove(endpoint, relay)
        if relay.first_byte_at:
            context.metrics.record_first_byte(self._model, relay.first_byte_at - self._began)
        return outcome

    def _request(self, endpoint: Endpoint, number: int) -> tuple[bytes, bytes]:
        """Return the head and the body of the request to a pod."""
        settings, scope = self._context.settings, self._scope
        target = scope["raw_path"]
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        lines = [b"POST %b HTTP/1.1\r\nhost: %b\r\n" % (target, str(endpoint.address).encode())]
        for name, value in scope["headers"]:
            if name not in _NOT_FORWARDED and (settings.forward_credentials or name not in _CREDENTIALS):
                lines.append(b"%b: %b\r\n" % (name, value))
        if not settings.forward_credentials:
            lines.append(bearer_line(settings.get_backend_key()).encode())
        lines.append(_REPORT_USAGE)
        lines.append(
            b"%b: %b\r\nx-request-id: %b\r\ncontent-length: %d\r\n\r\n"
            % (
                ROUTER_HEADER,
                format_router_header(self._context.router_id, number),
                self._id.encode(),
                len(self._body),
            )
        )
        return b"".join(lines), self._body

    async def _end_broken(self, relay: Relay, error: UpstreamError) -> None:
        """End a response that broke off in the middle.

        A stream of events ends with an error event. Any other body stays incomplete: the server closes its connection, and
        by that the client notices.
        """
        if relay.is_event_stream:
            failed = BadGateway(f"the pod's response broke off: {error}; the request may be repeated")
            self._writer.write(error_event(self._scope["path"], failed, self._id))
            await self._writer.end()

    async def _respond(self, backend: Backend, outcome: Outcome | None) -> None:
        match outcome:
            case Streamed(status):
                self._finish(status)
            case Broken(begun=True):
                self._finish(BadGateway.status)
            case Reply() if self._lacks_adapter(outcome):
                raise Unavailable(
                    f"no pod of the model {backend.model!r} has the adapter {self._adapter!r} now; retry",
                    retry_after_seconds=NO_POD_RETRY_SECONDS,
                )
            case Reply(status) if self._writer.has_begun:
                self._is_over = True
                await self._end_events(_reply_event(self._scope["path"], outcome, self._id), status)
            case Reply(status):
                self._is_over = True
                await self._writer.send_whole(outcome)
                self._finish(status)
            case Broken(error) if error.failure is Failure.TIMEOUT:
                raise GatewayTimeout(f"the model {backend.model!r} did not answer: {error}; retry")
            case Broken(error):
                raise BadGateway(
                    f"no pod of the model {backend.model!r} answered in {self._attempts} attempts: {error}; retry"
                )
            case _:
                raise Unavailable(
                    f"no pod of the model {backend.model!r} is ready; retry",
                    retry_after_seconds=NO_POD_RETRY_SECONDS,
                )

    def _finish(self, status: int) -> None:
        self._is_over = True
        self._context.metrics.record_response(self._model, status)
        usage = None if self._relay is None else self._relay.read_usage(self._meter.estimated_prompt)
        if self._expected_cached is not None and usage is not None and usage.prompt and not usage.estimated:
            expected = min(self._expected_cached, usage.prompt)
            self._context.metrics.record_prefix_hit(self._model, expected=expected, actual=usage.cached)
        self._meter.end(status, usage, model=self._adapter or self._model, service=self._service)
        log.event(
            "request_finished",
            id=self._id,
            model=self._model,
            pod=self._pod,
            status=status,
            attempts=self._attempts,
            seconds=self._loop.time() - self._began,
        )


def _expire(relay: Relay, connection: UpstreamConnection, limit: float) -> None:
    if not relay.first_byte_at:
        connection.abort(relay)
        relay.on_failure(UpstreamError(Failure.TIMEOUT, f"no byte of a response within {limit:g} s"))


def _ignore(text: str) -> None:
    """Report no progress: the client waits for a whole response."""


class _Error(msgspec.Struct):
    message: str = ""
    code: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _Error


def _reply_event(path: str, reply: Reply, request_id: str) -> bytes:
    """Return a whole response of a pod as an event of a stream; an error in the shape of the API of ``path``."""
    try:
        found = msgspec.json.decode(reply.body, type=_ErrorBody).error
    except msgspec.DecodeError:
        return b"data: " + reply.body.replace(b"\n", b" ") + b"\n\n"
    error = RequestError(found.message, code=found.code)
    error.status = reply.status
    if path in ANTHROPIC_PATHS or path == contract.PATH_RESPONSES:
        return error_event(path, error, request_id)
    return b"data: " + reply.body.replace(b"\n", b" ") + b"\n\n"


def error_event(path: str, error: RequestError, request_id: str) -> bytes:
    """Return the event that ends a broken stream, in the shape of the API that ``path`` belongs to."""
    if path in ANTHROPIC_PATHS:
        return encode_event(anthropic_error(error, request_id), "error")
    if path == contract.PATH_RESPONSES:
        event = {"type": "error", "code": error.code, "message": error.message, "param": None}
        return encode_event(event, "error")
    return b"data: " + error_body(error) + b"\n\n"
