"""What every request passes first: it gets an id, pages of other origins are told what they may, keys are looked at.

The gate wraps neither ``receive`` nor ``send``, for a token should not pay for it: it leaves in the scope the
headers that every response must carry.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from skiff_runtime import contract, log
from skiff_runtime.api.body import Receive, Scope, header_value
from skiff_runtime.api.origins import Origins
from skiff_runtime.api.reply import begin, own_id, reply_error
from skiff_runtime.api.writer import Headers, Send
from skiff_runtime.errors import InternalError, OriginRefused, RequestError, Unauthorized, Unavailable
from skiff_runtime.keys import KeyRing

OPEN_PATHS: Final = frozenset(
    {
        contract.PATH_LIVEZ,
        contract.PATH_READYZ,
        contract.PATH_STARTUPZ,
        contract.PATH_HEALTH_GENERATE,
        contract.PATH_METRICS,
    }
)
"""Served without a key and on connections beyond the limit: kubelets, scrapers and routers ask for them."""
DESCRIPTION_PATHS: Final = frozenset({contract.PATH_OPENAPI, contract.PATH_DOCS})
"""Served without a key, too: they tell what every Skiff serves, and a browser sends no key."""
KEYLESS_PATHS: Final = OPEN_PATHS | DESCRIPTION_PATHS
_BEARER: Final = re.compile(rb"[Bb][Ee][Aa][Rr][Ee][Rr] +(\S+)")

App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Gate:
    """An ASGI application around the one that serves."""

    def __init__(
        self,
        app: App,
        *,
        posts: Mapping[str, App],
        keys: KeyRing,
        origins: tuple[str, ...],
        on_refused: Callable[[int], None],
    ) -> None:
        """``posts``: what serves POST on these paths without passing ``app``, whose layers cost each token 0.6 us.

        ``on_refused`` is called with the status of each request that ends here.
        """
        self._app = app
        self._posts = posts
        self._keys = keys
        self._origins = Origins(origins)
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        own = begin(scope)
        own += self._origins.headers(scope["headers"])
        if self._origins.is_preflight(scope):
            await self._origins.answer_preflight(scope, send, own)
            return
        try:
            self._check(scope)
        except (OriginRefused, Unauthorized) as error:
            await self._refuse(scope, send, error)
            return
        endpoint = self._posts.get(scope["path"]) if scope["method"] == "POST" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        try:
            await endpoint(scope, receive, send)
        except Exception:  # noqa: BLE001 (a fault of ours: the client learns that, the log the rest)
            log.error("request_broken", exc_info=True, id=own_id(scope), path=scope["path"])
            await reply_error(
                scope, send, InternalError("an internal error; the log of the server tells more")
            )

    async def when_full(self, scope: Scope, receive: Receive, send: Send) -> None:
        """In place of ``__call__`` on a connection beyond the limit: probes are answered, others refused."""
        if scope["path"] in OPEN_PATHS:
            await self(scope, receive, send)
            return
        begin(scope).append((b"connection", b"close"))
        full = Unavailable("too many connections are open (--max-connections); retry shortly")
        await self._refuse(scope, send, full)

    def _check(self, scope: Scope) -> None:
        """Raise ``Unauthorized`` or ``OriginRefused``. A key is what no page has of itself: with keys, any origin may ask."""
        if not self._keys:
            self._origins.check(scope)
        elif scope["path"] not in KEYLESS_PATHS:
            self._check_key(scope["headers"])

    def _check_key(self, headers: Headers) -> None:
        """Raise ``Unauthorized`` unless the request carries a key that is known."""
        given = _BEARER.fullmatch(header_value(headers, b"authorization"))
        if given is None:
            raise Unauthorized("an API key is needed: send the header 'Authorization: Bearer KEY'")
        if not self._keys.opens(given.group(1)):
            raise Unauthorized("the API key is not known here; ask the service's owner for one")

    async def _refuse(self, scope: Scope, send: Send, error: RequestError) -> None:
        self._on_refused(error.status)
        await reply_error(scope, send, error)
