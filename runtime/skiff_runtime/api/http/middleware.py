"""ASGI middleware: request IDs, CORS, access control and response headers."""

from collections.abc import Callable, Mapping
from typing import Final

from skiff_runtime import log
from skiff_runtime.api.http.asgi import App, Message, Receive, Scope, Send
from skiff_runtime.api.http.auth import AccessPolicy, set_principal
from skiff_runtime.api.http.responses import (
    begin_response,
    get_request_id,
    get_response_headers,
    send_error,
)
from skiff_runtime.errors import (
    UNEXPECTED_ERROR,
    HostRefused,
    InternalError,
    OriginRefused,
    RequestError,
    Unauthorized,
    Unavailable,
)

_NO_ENDPOINTS: Final[Mapping[str, App]] = {}


class AccessMiddleware:
    """The outermost ASGI application: gives each request an ID and a principal, or rejects it.

    It wraps neither ``receive`` nor ``send``, so that tokens do not pay for it. Instead it stores in the scope the
    headers that every response must carry.
    """

    def __init__(
        self,
        app: App,
        *,
        posts: Mapping[str, App],
        gets: Mapping[str, App] | None = None,
        access: AccessPolicy,
        on_rejected: Callable[[int], None],
    ) -> None:
        """``posts``: applications that serve POST on these paths, past ``app``, whose layers cost 0.6 µs for each token.
        ``gets``: the same for GET.

        ``on_rejected`` is called with the status of each request that is rejected here or in the HTTP protocol.
        """
        self._app = app
        self._endpoints = {"POST": posts, "GET": gets or {}}
        self._access = access
        self._cors = access.cors
        self.on_rejected = on_rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        headers = begin_response(scope)
        headers += self._cors.response_headers(scope["headers"])
        if self._cors.is_preflight(scope):
            await self._cors.answer_preflight(scope, send, headers)
            return
        try:
            set_principal(scope, self._access.authorize(scope))
        except (HostRefused, OriginRefused, Unauthorized) as error:
            await self._reject(scope, send, error)
            return
        endpoint = self._endpoints.get(scope["method"], _NO_ENDPOINTS).get(scope["path"])
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            await endpoint(scope, receive, send)
        except Exception:  # noqa: BLE001 (a bug: the client gets a 500, the log the traceback)
            log.error("request_handler_failed", exc_info=True, id=get_request_id(scope), path=scope["path"])
            await send_error(scope, send, InternalError(UNEXPECTED_ERROR))

    async def handle_over_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request on a connection beyond the limit, in place of ``__call__``: reject all but probes."""
        if scope["path"] in self._access.probe_paths:
            await self(scope, receive, send)
            return
        begin_response(scope).append((b"connection", b"close"))
        error = Unavailable("too many connections are open (--max-connections); retry shortly")
        await self._reject(scope, send, error)

    async def _reject(self, scope: Scope, send: Send, error: RequestError) -> None:
        self.on_rejected(error.status)
        await send_error(scope, send, error)


class ResponseHeadersMiddleware:
    """Adds to every response the headers that ``AccessMiddleware`` stored for it, and serves HEAD as GET.

    The HTTP protocol leaves the body out of a response to HEAD. Generation endpoints do without this layer.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *get_response_headers(scope)]
            await send(message)

        as_get = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        await self._app(as_get, receive, send_with_headers)
