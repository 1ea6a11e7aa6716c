"""The FastAPI application: its routers, exception handlers and OpenAPI document, and the middleware around it."""

from functools import partial
from typing import Any, Final

from fastapi import Depends, FastAPI

from skiff_runtime import contract
from skiff_runtime.api.dispatch.adapter_manager import AdapterManager
from skiff_runtime.api.dispatch.dispatcher import Dispatcher
from skiff_runtime.api.dispatch.rpc import RpcClient
from skiff_runtime.api.dispatch.service_status import ServiceStatus
from skiff_runtime.api.dispatch.state_stream import StateStream
from skiff_runtime.api.formats.chat_completions import prepare_chat
from skiff_runtime.api.formats.completions import prepare_completion
from skiff_runtime.api.formats.embeddings import prepare_embeddings
from skiff_runtime.api.formats.generate import prepare_generate
from skiff_runtime.api.formats.messages import prepare_messages
from skiff_runtime.api.formats.response_store import ResponseStore
from skiff_runtime.api.formats.responses import prepare_response
from skiff_runtime.api.formats.scores import prepare_rerank, prepare_score
from skiff_runtime.api.formats.served_model import ServedModel
from skiff_runtime.api.http.auth import AccessPolicy
from skiff_runtime.api.http.middleware import (
    AccessMiddleware,
    ResponseHeadersMiddleware,
)
from skiff_runtime.api.http.request_body import BodyReader
from skiff_runtime.api.routes.adapters import make_adapter_routes
from skiff_runtime.api.routes.admin import make_admin_routes
from skiff_runtime.api.routes.events import EventsEndpoint, make_event_routes
from skiff_runtime.api.routes.exception_handlers import add_exception_handlers
from skiff_runtime.api.routes.generation_endpoint import (
    GenerationEndpoint,
    GenerationSettings,
    Prepare,
    for_any_principal,
    make_generation_routes,
)
from skiff_runtime.api.routes.home_page import make_home_page_routes
from skiff_runtime.api.routes.messages import make_messages_routes
from skiff_runtime.api.routes.openapi import (
    DEFAULT_RESPONSES,
    OpenApiMiddleware,
    bearer_key,
    document_request_id,
    error_responses,
)
from skiff_runtime.api.routes.pooling import RERANK_PATHS, SCORE_PATHS, make_pooling_routes
from skiff_runtime.api.routes.probes import make_probe_routes
from skiff_runtime.api.routes.responses import make_response_routes
from skiff_runtime.api.routes.server_info import make_server_info_routes
from skiff_runtime.api.routes.tokenization import make_tokenization_routes
from skiff_runtime.metrics.definitions import Metrics
from skiff_runtime.metrics.labels import Endpoint
from skiff_runtime.processes.launch import Launch
from skiff_runtime.version import __version__

_ABOUT: Final = (
    "Generates text with one large language model, as OpenAI's and Anthropic's APIs do. Errors have the shape of the API "
    "that their path belongs to; every response carries the X-Request-Id of the request, or a new one."
)


def build_app(
    launch: Launch,
    status: ServiceStatus,
    dispatcher: Dispatcher,
    *,
    rpc: RpcClient,
    metrics: Metrics,
    events: StateStream,
    access: AccessPolicy,
    model: ServedModel,
    adapters: AdapterManager,
) -> AccessMiddleware:
    """Return the application behind its middleware, which passes generation requests directly to their endpoints."""
    config = launch.config
    body = BodyReader(config.max_request_bytes, max_values=2 * model.max_model_len)
    settings = GenerationSettings.from_config(config)
    store = ResponseStore()
    endpoints: list[tuple[str, Endpoint, Prepare]] = [
        (contract.PATH_CHAT_COMPLETIONS, Endpoint.CHAT, for_any_principal(prepare_chat)),
        (contract.PATH_RESPONSES, Endpoint.RESPONSES, partial(prepare_response, store=store)),
        (contract.PATH_COMPLETIONS, Endpoint.COMPLETIONS, for_any_principal(prepare_completion)),
        (contract.PATH_MESSAGES, Endpoint.MESSAGES, for_any_principal(prepare_messages)),
        (contract.PATH_GENERATE, Endpoint.GENERATE, for_any_principal(prepare_generate)),
        (contract.PATH_EMBEDDINGS, Endpoint.EMBEDDINGS, for_any_principal(prepare_embeddings)),
        *((path, Endpoint.RERANK, for_any_principal(prepare_rerank)) for path in RERANK_PATHS),
        *((path, Endpoint.SCORE, for_any_principal(prepare_score)) for path in SCORE_PATHS),
    ]
    generation_endpoints = {
        path: GenerationEndpoint(
            name,
            prepare,
            model=model,
            dispatcher=dispatcher,
            metrics=metrics,
            body=body,
            settings=settings,
            events=events,
            adapters=adapters,
        )
        for path, name, prepare in endpoints
    }
    app = FastAPI(
        title="Skiff",
        version=__version__,
        description=_ABOUT,
        openapi_url=contract.PATH_OPENAPI,
        docs_url=contract.PATH_DOCS,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,
        dependencies=[Depends(document_request_id)],
        responses=DEFAULT_RESPONSES,
    )
    app.state.body = body
    add_exception_handlers(app, metrics.record_rejection)
    # Without keys, a page of another origin may still read, but gets a 403 for anything else.
    keyed: dict[str, Any] = {"dependencies": [Depends(bearer_key)], "responses": error_responses(401)}
    reads = keyed if config.requires_key else {}
    writes = keyed if config.requires_key else {"responses": error_responses(403)}
    app.include_router(make_generation_routes(), **writes)
    app.include_router(make_messages_routes(model, rpc, keyed=config.requires_key), **writes)
    app.include_router(make_response_routes(store), **writes)
    app.include_router(make_pooling_routes(), **writes)
    app.include_router(make_tokenization_routes(model, rpc), **writes)
    app.include_router(make_admin_routes(dispatcher, rpc), **writes)
    app.include_router(make_adapter_routes(adapters), **writes)
    app.include_router(make_server_info_routes(launch, model, status), **reads)
    app.include_router(make_probe_routes(status, dispatcher, metrics))
    app.include_router(make_event_routes())
    app.include_router(make_home_page_routes())
    return AccessMiddleware(
        ResponseHeadersMiddleware(OpenApiMiddleware(app)),
        posts=generation_endpoints,
        gets={contract.PATH_EVENTS: EventsEndpoint(events)},
        access=access,
        on_rejected=metrics.record_rejection,
    )
