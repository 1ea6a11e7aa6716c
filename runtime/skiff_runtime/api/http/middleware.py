"""The gate that every request passes first: it gives it an id and finds its principal, or refuses it.

The gate wraps neither ``receive`` nor ``send``, for a token should not pay for it: it leaves in the scope the
headers that every response must carry.
"""

from collections.abc import Awaitable, Callable, Mapping

from skiff_runtime import log
from skiff_runtime.api.http.asgi import Send
from skiff_runtime.api.http.auth import PROBE_PATHS, AccessPolicy
from skiff_runtime.api.http.request_body import Receive, Scope
from skiff_runtime.api.http.responses import begin, get_request_id, send_error
from skiff_runtime.api.principal import set_principal
from skiff_runtime.errors import (
    HostRefused,
    InternalError,
    OriginRefused,
    RequestError,
    Unauthorized,
    Unavailable,
)

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class AccessMiddleware:
    """An ASGI application around the one that serves."""

    def __init__(
        self,
        app: App,
        *,
        posts: Mapping[str, App],
        access: AccessPolicy,
        on_refused: Callable[[int], None],
    ) -> None:
        """``posts``: what serves POST on these paths without passing ``app``, whose layers cost each token 0.6 us.

        ``on_refused`` is called with the status of each request that ends here, or before it got here.
        """
        self._app = app
        self._posts = posts
        self._access = access
        self._origins = access.origins
        self.on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        own = begin(scope)
        own += self._origins.headers(scope["headers"])
        if self._origins.is_preflight(scope):
            await self._origins.answer_preflight(scope, send, own)
            return
        try:
            set_principal(scope, self._access.check(scope))
        except (HostRefused, OriginRefused, Unauthorized) as error:
            await self._refuse(scope, send, error)
            return
        endpoint = self._posts.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            await endpoint(scope, receive, send)
        except Exception:  # noqa: BLE001 (a fault of ours: the client learns that, the log the rest)
            log.error("request_handler_failed", exc_info=True, id=get_request_id(scope), path=scope["path"])
            await send_error(
                scope, send, InternalError("an internal error; the log of the server tells more")
            )

    async def handle_over_limit(self, scope: Scope, receive: Receive, send: Send) -> None:
        """In place of ``__call__`` on a connection beyond the limit: probes are answered, others refused."""
        if scope["path"] in PROBE_PATHS:
            await self(scope, receive, send)
            return
        begin(scope).append((b"connection", b"close"))
        full = Unavailable("too many connections are open (--max-connections); retry shortly")
        await self._refuse(scope, send, full)

    async def _refuse(self, scope: Scope, send: Send, error: RequestError) -> None:
        self.on_refused(error.status)
        await send_error(scope, send, error)
