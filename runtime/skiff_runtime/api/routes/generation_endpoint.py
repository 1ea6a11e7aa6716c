"""Generation endpoints: as ASGI applications, and in the OpenAPI document.

POST requests on their paths go from the access middleware to a ``GenerationEndpoint`` without passing FastAPI
(docs/decisions/0012-fastapi-beside-the-hot-path.md has the costs): the body is read, the request dispatched, and the
response written by its choice writers. FastAPI gets routes that declare bodies and responses and are never called.

A request's own task only waits for the client to disconnect. Rows are written from the callback that reads messages; the
server ends the wait when the response is complete, or when the client disconnects, which aborts the request.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self

from fastapi import APIRouter, Depends, Header, Response
from pydantic import BaseModel, Field
from pydantic.json_schema import SkipJsonSchema

from skiff_runtime import contract, log
from skiff_runtime.api.dispatch.adapter_manager import AdapterManager
from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.request_state import RequestMetadata
from skiff_runtime.api.dispatch.response_writers import make_choice_writers, write_error
from skiff_runtime.api.dispatch.state_stream import StateStream
from skiff_runtime.api.formats.request_spec import RequestSpec
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.http.asgi import Receive, Scope, Send
from skiff_runtime.api.http.auth import Principal, derive_cache_namespace, get_principal
from skiff_runtime.api.http.request_body import BodyReader, ClientDisconnected
from skiff_runtime.api.http.request_headers import MAX_DEADLINE_SECONDS, get_trace_context, parse_deadline
from skiff_runtime.api.http.responses import error_body_for
from skiff_runtime.api.http.router_header import parse_router_header
from skiff_runtime.api.routes.exchange import Exchange
from skiff_runtime.api.routes.openapi import DEFAULT_RESPONSES, error_responses, schema_reference
from skiff_runtime.api.schemas.error_bodies import ErrorResponse
from skiff_runtime.api.schemas.request_bodies import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateBody,
)
from skiff_runtime.api.schemas.response_bodies import (
    ChatCompletionChunk,
    ChatCompletionResponse,
    CompletionResponse,
    GenerateResponse,
)
from skiff_runtime.config import Config
from skiff_runtime.errors import RequestError
from skiff_runtime.metrics.definitions import Metrics
from skiff_runtime.metrics.labels import Endpoint, Outcome
from skiff_runtime.prompt_blocks import PromptBlocks, adapter_namespace, hash_body
from skiff_runtime.sse import DONE

EVENT_STREAM: Final = "text/event-stream"

Prepare = Callable[[bytes, ServedModel, Principal], RequestSpec]
"""Validates a raw body, and raises ``RequestError``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSettings:
    """Settings that all generation endpoints share.

    ``max_seconds``: deadline of every request, 0 for none. ``traced``: requests are traced. ``allow_priority``: clients
    without an admin key may raise their priority. ``isolate_keys``: only requests of one key share cached prefixes.
    """

    max_seconds: float
    traced: bool
    allow_priority: bool
    isolate_keys: bool

    @classmethod
    def from_config(cls, config: Config) -> Self:
        """Return the settings of a configuration."""
        return cls(
            max_seconds=config.request_timeout_seconds,
            traced=config.otlp_traces_endpoint is not None,
            allow_priority=config.allow_priority,
            isolate_keys=config.isolate_keys,
        )


def for_any_principal(prepare: Callable[[bytes, ServedModel], RequestSpec]) -> Prepare:
    """Return ``prepare`` for requests whose meaning does not depend on their sender."""
    return lambda raw, model, _principal: prepare(raw, model)


class GenerationEndpoint:
    """The ASGI application of one path."""

    def __init__(
        self,
        name: Endpoint,
        prepare: Prepare,
        *,
        model: ServedModel,
        dispatcher: Dispatcher,
        metrics: Metrics,
        body: BodyReader,
        settings: GenerationSettings,
        events: StateStream,
        adapters: AdapterManager,
    ) -> None:
        self._name = name
        self._prepare = prepare
        self._model = model
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._body = body
        self._settings = settings
        self._events = events
        self._adapters = adapters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        exchange = Exchange(scope, send)
        settings = self._settings
        try:
            deadline = parse_deadline(scope["headers"], settings.max_seconds)
            raw = await self._body.read(scope, receive)
            principal = get_principal(scope)
            spec = self._prepare(raw, self._model, principal)
            if spec.pooling is None:
                self._model.check_generates()
            principal.require_priority(spec.priority, allowed=settings.allow_priority)
            namespace = derive_cache_namespace(
                principal.key if settings.isolate_keys else b"", spec.cache_salt
            )
            blocks = self._hash_prompt(raw, namespace, spec.adapter_id)
            request = self._dispatcher.submit(
                spec,
                make_choice_writers(
                    spec,
                    exchange.writer,
                    exchange.headers,
                    request_id=exchange.id,
                    trailed=exchange.trailed,
                ),
                RequestMetadata(
                    request_id=exchange.id,
                    endpoint=self._name,
                    deadline_seconds=deadline,
                    trace=get_trace_context(scope["headers"]) if settings.traced else None,
                    key=principal.key,
                    cache_salt=namespace,
                    prompt_blocks=blocks,
                ),
            )
        except ClientDisconnected:
            return
        except RequestError as error:
            self._reject(scope, exchange, error)
            await exchange.wait_until_over(receive)
            return
        try:
            if self._events.watches_prompts:
                self._events.record_accepted(request.first_uid, blocks, parse_router_header(scope["headers"]))
            await exchange.wait_until_over(receive)
        finally:
            self._dispatcher.abort(request)
            self._events.record_ended(request.first_uid)

    def _hash_prompt(self, raw: bytes, namespace: bytes, adapter_id: int) -> PromptBlocks | None:
        """Return the prompt blocks of a body while a router watches, else None."""
        if not self._events.watches_prompts:
            return None
        adapter = self._adapters.find_name(adapter_id) if adapter_id else ""
        return hash_body(raw, adapter_namespace(namespace, adapter))

    def _reject(self, scope: Scope, exchange: Exchange, error: RequestError) -> None:
        self._metrics.record_request(self._name, Outcome.REJECTED, 0.0)
        self._metrics.record_rejection(error.status)
        log.event(
            "request_rejected",
            id=exchange.id,
            endpoint=self._name,
            status=error.status,
            error=error.message,
        )
        write_error(exchange.writer, error, error_body_for(scope, error), exchange.headers)


async def document_headers(
    x_request_timeout_seconds: Annotated[
        Annotated[float, Field(gt=0, le=MAX_DEADLINE_SECONDS)] | SkipJsonSchema[None],
        Header(description="Ends the request after this many seconds."),
    ] = None,
    traceparent: Annotated[str, Header(description="W3C trace context.")] = "",
) -> None:
    """Document the headers that the endpoints read."""


def document_responses(
    full: type[BaseModel],
    event: type[BaseModel],
    *,
    error: type[BaseModel] = ErrorResponse,
    has_done_event: bool = True,
) -> dict[str, Any]:
    """Document a response that is JSON, or a stream of server-sent events.

    ``itemSchema`` describes one event of the stream, as OpenAPI 3.2 and FastAPI do. A request that fails after its first
    event ends with an event that holds the error. ``response_model`` puts the schema of the events among the document's
    components.
    """
    payloads = [schema_reference(model) for model in (event, error)]
    json_event = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": payloads},
    }
    data: dict[str, Any] = json_event
    if has_done_event:
        done = DONE.decode()
        data = {
            "anyOf": [{"const": done}, json_event],
            "description": f"The last event of a stream is {done}.",
        }
    events = {"itemSchema": {"type": "object", "properties": {"data": data}, "required": ["data"]}}
    success = {**DEFAULT_RESPONSES[200], "model": full, "content": {EVENT_STREAM: events}}
    return {"response_class": Response, "response_model": event, "responses": {200: success}}


def make_generation_router(error: type[BaseModel] = ErrorResponse) -> APIRouter:
    """Return a router of routes that document generation endpoints, whose errors have the shape ``error``."""
    return APIRouter(
        tags=["generation"],
        dependencies=[Depends(document_headers)],
        responses=error_responses(400, 404, 408, 413, 429, 500, 503, 504, error=error),
    )


def make_generation_routes() -> APIRouter:
    """Return the routes that document the generation endpoints, and are never called."""
    router = make_generation_router()

    @router.post(
        contract.PATH_CHAT_COMPLETIONS,
        summary="Answer a conversation",
        **document_responses(ChatCompletionResponse, ChatCompletionChunk),
    )
    async def chat_completions(body: ChatCompletionRequest) -> None:
        """With "stream": true the response is a stream of server-sent events."""

    @router.post(
        contract.PATH_COMPLETIONS,
        summary="Continue a text",
        **document_responses(CompletionResponse, CompletionResponse),
    )
    async def completions(body: CompletionRequest) -> None:
        """With "stream": true the response is a stream of server-sent events."""

    @router.post(
        contract.PATH_GENERATE,
        summary="Continue a text or token IDs",
        **document_responses(GenerateResponse, GenerateResponse),
    )
    async def generate(body: GenerateBody) -> None:
        """Skiff's own endpoint: text or token IDs in, text and token IDs out, whole or as a stream of server-sent events."""

    return router
