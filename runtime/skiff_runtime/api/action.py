"""A POST endpoint that is answered with one JSON body: read, validate, act, reply."""

from collections.abc import Awaitable, Callable

from skiff_runtime.api.body import BodyReader, ClientGone, Receive, Scope
from skiff_runtime.api.reply import reply, reply_error
from skiff_runtime.api.sse import encode_json
from skiff_runtime.api.writer import Send
from skiff_runtime.errors import RequestError
from skiff_runtime.metrics import Metrics

Action = Callable[[bytes], Awaitable[dict[str, object]]]


class ActionEndpoint:
    """An ASGI application. ``action`` makes a reply of a raw body, or raises ``RequestError``."""

    def __init__(self, action: Action, *, body: BodyReader, metrics: Metrics) -> None:
        self._action = action
        self._body = body
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        try:
            told = await self._action(await self._body.read(scope["headers"], receive))
        except ClientGone:
            return
        except RequestError as error:
            self._metrics.note_refused(error.status)
            await reply_error(scope, send, error)
            return
        await reply(scope, send, 200, encode_json(told))
