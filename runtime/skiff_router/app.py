"""The router's ASGI application: the proxied paths, and the few that the router answers itself."""

import time
from collections.abc import Callable
from typing import Final

from skiff_router.endpoints import Registry
from skiff_router.errors import MethodNotAllowed, PathNotFound
from skiff_router.metrics import CONTENT_TYPE, RouterMetrics
from skiff_runtime import contract
from skiff_runtime.api.http.asgi import App, Receive, Scope, Send
from skiff_runtime.api.http.responses import send_error, send_response
from skiff_runtime.errors import RequestError, Unavailable
from skiff_runtime.sse import encode_json

PROXIED: Final = (
    contract.PATH_CHAT_COMPLETIONS,
    contract.PATH_COMPLETIONS,
    contract.PATH_RESPONSES,
    contract.PATH_MESSAGES,
    contract.PATH_COUNT_TOKENS,
    contract.PATH_EMBEDDINGS,
    contract.PATH_RERANK,
    contract.PATH_RERANK_BARE,
    contract.PATH_RERANK_V2,
    contract.PATH_SCORE,
    contract.PATH_SCORE_BARE,
    contract.PATH_TOKENIZE,
    contract.PATH_DETOKENIZE,
    contract.PATH_GENERATE,
)
"""Paths whose POST goes to a pod of the request's model."""


class RouterApp:
    """Everything but POST on the proxied paths."""

    def __init__(self, registry: Registry, metrics: RouterMetrics, *, is_ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._metrics = metrics
        self._is_ready = is_ready
        self._created = int(time.time())
        self._pages: dict[str, Callable[[], tuple[bytes, str]]] = {
            contract.PATH_LIVEZ: lambda: (b"ok\n", "text/plain"),
            contract.PATH_READYZ: self._ready,
            contract.PATH_HEALTH: self._ready,
            contract.PATH_METRICS: lambda: (self._metrics.page(), CONTENT_TYPE),
            contract.PATH_MODELS: self._models,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path, method = scope["path"], scope["method"]
        try:
            page = self._pages.get(path)
            if page is None and path not in PROXIED:
                raise PathNotFound(f"there is no path {path}; the router serves POST on {', '.join(PROXIED)}")
            if page is None or method not in ("GET", "HEAD"):
                allowed = "GET" if page is not None else "POST"
                raise MethodNotAllowed(f"{path} takes {allowed}, not {method}")
            body, content_type = page()
        except RequestError as error:
            self._metrics.record_rejection(error.status)
            await send_error(scope, send, error)
            return
        await send_response(scope, send, 200, body, content_type)

    def _ready(self) -> tuple[bytes, str]:
        if not self._is_ready():
            raise Unavailable(
                "the router does not know the models yet, or shuts down; another replica may answer",
                retry_after_seconds=1,
            )
        return b"ok\n", "text/plain"

    def _models(self) -> tuple[bytes, str]:
        """List the models and their LoRA adapters as OpenAI's API does, with the state of their pods."""
        models: list[dict[str, object]] = []
        for backend in self._registry.backends:
            states = [endpoint.state for endpoint in backend.endpoints]
            common = {
                "object": "model",
                "created": self._created,
                "owned_by": "skiff",
                "service": backend.key,
                "state": backend.state,
                "pods": {state: states.count(state) for state in sorted(set(states))},
            }
            name = self._registry.public_name(backend)
            models.append({"id": name, **common})
            for adapter in sorted(backend.adapters):
                public = self._registry.public_adapter_name(backend, adapter)
                models.append({"id": public, **common, "parent": name, "ready": backend.adapters[adapter]})
        return encode_json({"object": "list", "data": models}), "application/json"


def proxied_routes(proxy: App) -> dict[str, App]:
    """Return the proxied paths with their application."""
    return dict.fromkeys(PROXIED, proxy)
