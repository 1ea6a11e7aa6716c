"""A generation endpoint as an ASGI application: body in, request dispatched, reply written by its sink.

The request's own task does nothing but wait for the client to leave. Rows are written from the reader's callback;
the server ends the wait when the response is complete, or when the client disconnects, which aborts the request.
"""

import asyncio
from collections.abc import Callable

from skiff_runtime import log
from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.request_state import RequestMetadata
from skiff_runtime.api.dispatch.response_writers import make_choice_writers, write_error
from skiff_runtime.api.formats.request_spec import RequestSpec
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.http.asgi import CHUNK_WRITER_EXTENSION, AsgiWriter, Send
from skiff_runtime.api.http.request_body import (
    BodyReader,
    ClientDisconnected,
    Receive,
    Scope,
    deadline_seconds,
    get_trace_context,
)
from skiff_runtime.api.http.responses import get_request_id, get_response_headers
from skiff_runtime.api.principal import derive_cache_namespace, get_principal
from skiff_runtime.errors import RequestError
from skiff_runtime.metrics.definitions import Metrics
from skiff_runtime.metrics.labels import Endpoint, Outcome

Prepare = Callable[[bytes, ServedModel], RequestSpec]


class GenerationEndpoint:
    """One path. ``prepare`` makes a generation of a raw body, or raises ``RequestError``."""

    def __init__(
        self,
        name: Endpoint,
        prepare: Prepare,
        *,
        model: ServedModel,
        dispatcher: Dispatcher,
        metrics: Metrics,
        body: BodyReader,
        longest_seconds: float,
        traced: bool,
        allows_priority: bool,
        isolates_keys: bool,
    ) -> None:
        """``longest_seconds``: when a request is ended at the latest, 0 for never; ``traced``: its parent is wanted.

        ``allows_priority``: requests may ask to run before others; ``isolates_keys``: cached prefixes are shared by
        requests of one key only.
        """
        self._name = name
        self._prepare = prepare
        self._model = model
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._body = body
        self._longest_seconds = longest_seconds
        self._traced = traced
        self._allows_priority = allows_priority
        self._isolates_keys = isolates_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = _Exchange(scope, send)
        try:
            deadline = deadline_seconds(scope["headers"], self._longest_seconds)
            raw = await self._body.read(scope["headers"], receive)
            generation = self._prepare(raw, self._model)
            principal = get_principal(scope)
            principal.require_priority(generation.priority, allowed=self._allows_priority)
            flight = self._dispatcher.submit(
                generation,
                make_choice_writers(generation, exchange.writer, exchange.headers),
                RequestMetadata(
                    request_id=exchange.id,
                    endpoint=self._name,
                    deadline_seconds=deadline,
                    trace=get_trace_context(scope["headers"]) if self._traced else None,
                    key=principal.key,
                    cache_salt=derive_cache_namespace(
                        principal.key if self._isolates_keys else b"", generation.cache_salt
                    ),
                ),
            )
        except ClientDisconnected:
            return
        except RequestError as error:
            self._metrics.record_request(self._name, Outcome.REJECTED, 0.0)
            self._metrics.record_rejection(error.status)
            log.event(
                "request_rejected",
                id=exchange.id,
                endpoint=self._name,
                status=error.status,
                error=error.message,
            )
            write_error(exchange.writer, error, exchange.headers)
            await exchange.ended(receive)
            return
        try:
            await exchange.ended(receive)
        finally:
            self._dispatcher.abort(flight)


class _Exchange:
    """One request and its response."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.id = get_request_id(scope)
        self.headers = get_response_headers(scope)
        chunk = scope.get("extensions", {}).get(CHUNK_WRITER_EXTENSION)
        self.writer = AsgiWriter(send, on_overflow=self._give_up, chunk=chunk)
        self._task = asyncio.current_task()

    async def ended(self, receive: Receive) -> None:
        """Wait until the response is complete, the client has left, or it reads too slowly."""
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except asyncio.CancelledError:
            if not self.writer.closed:
                raise
            log.warning("slow_client_disconnected", id=self.id)

    def _give_up(self) -> None:
        assert self._task is not None
        self._task.cancel()
