"""The FastAPI application: which path is served by what, and errors in OpenAI's shape wherever they arise."""

import functools

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from skiff_runtime import contract
from skiff_runtime.api.action import Action, ActionEndpoint
from skiff_runtime.api.body import BodyReader
from skiff_runtime.api.chat import prepare_chat
from skiff_runtime.api.completions import prepare_completion
from skiff_runtime.api.control import ControlActions
from skiff_runtime.api.dispatcher import Dispatcher
from skiff_runtime.api.docs_page import docs_page
from skiff_runtime.api.endpoint import GenerationEndpoint, Prepare
from skiff_runtime.api.error_replies import error_body
from skiff_runtime.api.gate import Gate
from skiff_runtime.api.generate import prepare_generate
from skiff_runtime.api.generation import ServedModel
from skiff_runtime.api.openapi import description
from skiff_runtime.api.probes import HealthEndpoint, Probes, SimpleEndpoint
from skiff_runtime.api.queries import Queries
from skiff_runtime.api.reply import JSON, own_headers
from skiff_runtime.api.sse import encode_json
from skiff_runtime.api.status import ServiceStatus
from skiff_runtime.api.tokens import TokenActions
from skiff_runtime.errors import InternalError, InvalidRequest, RequestError
from skiff_runtime.exposition import CONTENT_TYPE
from skiff_runtime.keys import KeyRing
from skiff_runtime.launch import Launch
from skiff_runtime.metric_labels import Endpoint
from skiff_runtime.metrics import Metrics

HTML = "text/html; charset=utf-8"
_GENERATION_PATHS = ", ".join(
    (contract.PATH_CHAT_COMPLETIONS, contract.PATH_COMPLETIONS, contract.PATH_GENERATE)
)


def build_app(
    launch: Launch,
    status: ServiceStatus,
    dispatcher: Dispatcher,
    *,
    queries: Queries,
    metrics: Metrics,
) -> Gate:
    """Assemble the application, and the gate before it, which hands requests to generate text to their endpoints."""
    model = ServedModel.of(launch)
    body = BodyReader(launch.config.max_request_bytes, max_values=2 * model.max_model_len)

    def generation(name: Endpoint, prepare: Prepare) -> GenerationEndpoint:
        return GenerationEndpoint(
            name,
            prepare,
            model=model,
            dispatcher=dispatcher,
            metrics=metrics,
            body=body,
            longest_seconds=launch.config.request_timeout_seconds,
            traced=launch.config.otlp_endpoint is not None,
        )

    def action(path: str, act: Action) -> Route:
        return Route(path, ActionEndpoint(act, body=body, metrics=metrics), methods=["POST"])

    tokens = TokenActions(model, queries)
    control = ControlActions(dispatcher, queries)
    generations = {
        contract.PATH_CHAT_COMPLETIONS: generation(Endpoint.CHAT, prepare_chat),
        contract.PATH_COMPLETIONS: generation(Endpoint.COMPLETIONS, prepare_completion),
        contract.PATH_GENERATE: generation(Endpoint.GENERATE, prepare_generate),
    }
    routes: list[BaseRoute] = [
        *(Route(path, endpoint, methods=["POST"]) for path, endpoint in generations.items()),
        action(contract.PATH_TOKENIZE, tokens.tokenize),
        action(contract.PATH_DETOKENIZE, tokens.detokenize),
        action(contract.PATH_ABORT, control.abort),
        action(contract.PATH_FLUSH_CACHE, control.flush_cache),
        *_probe_routes(Probes(launch, model, status, metrics)),
        *_description_routes(keys=bool(launch.config.api_key)),
        Route(contract.PATH_HEALTH_GENERATE, HealthEndpoint(dispatcher), methods=["GET"]),
    ]
    app = FastAPI(
        title="Skiff",
        routes=routes,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers={HTTPException: _http_error, Exception: _unexpected},
    )
    app.state.on_refused = metrics.note_refused
    config = launch.config
    return Gate(
        app,
        posts=generations,
        keys=KeyRing(config.api_key),
        origins=config.cors_origin,
        on_refused=metrics.note_refused,
    )


def _probe_routes(probes: Probes) -> list[Route]:
    simple = {
        contract.PATH_LIVEZ: probes.livez,
        contract.PATH_READYZ: probes.readyz,
        contract.PATH_STARTUPZ: probes.startupz,
        contract.PATH_SERVER_INFO: probes.server_info,
        contract.PATH_MODELS: probes.models,
        contract.PATH_MODELS + "/{name:path}": probes.one_model,
    }
    routes = [Route(path, SimpleEndpoint(handler), methods=["GET"]) for path, handler in simple.items()]
    page = SimpleEndpoint(probes.metrics, content_type=CONTENT_TYPE)
    return [*routes, Route(contract.PATH_METRICS, page, methods=["GET"])]


def _description_routes(*, keys: bool) -> list[Route]:
    """The description is made when it is first asked for: most services never are."""

    @functools.cache
    def document() -> bytes:
        return encode_json(description(keys=keys))

    @functools.cache
    def page() -> bytes:
        return docs_page(description(keys=keys))

    html = SimpleEndpoint(lambda _scope: (200, page()), content_type=HTML)
    return [
        Route(contract.PATH_OPENAPI, SimpleEndpoint(lambda _scope: (200, document())), methods=["GET"]),
        Route(contract.PATH_DOCS, html, methods=["GET"]),
    ]


async def _http_error(request: Request, error: Exception) -> Response:
    """A path or a method that does not exist."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    request.app.state.on_refused(error.status_code)
    if error.status_code == 404:
        refusal = InvalidRequest(
            f"there is no {path}: this server generates text only, at {_GENERATION_PATHS}; "
            f"GET {contract.PATH_DOCS} lists every path",
            code="not_found",
        )
    else:
        allowed = (error.headers or {}).get("Allow", "another method")
        refusal = InvalidRequest(
            f"{path} does not take {request.method}; use {allowed}", code="method_not_allowed"
        )
    allow = (error.headers or {}).get("Allow")
    return _response(request, refusal, error.status_code, {"Allow": allow} if allow else {})


async def _unexpected(request: Request, _error: Exception) -> Response:
    """A fault of ours: the client learns that, the log learns the rest from the server."""
    return _response(request, InternalError("an internal error; the log of the server tells more"), 500, {})


def _response(request: Request, error: RequestError, status: int, headers: dict[str, str]) -> Response:
    own = {name.decode(): value.decode() for name, value in own_headers(request.scope)}
    return Response(error_body(error), status_code=status, media_type=JSON, headers={**own, **headers})
