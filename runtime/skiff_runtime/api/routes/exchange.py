"""One HTTP exchange whose response is written from callbacks, while the request's own task waits for its end."""

import asyncio

from skiff_runtime import log
from skiff_runtime.api.http.asgi import CHUNK_WRITER_EXTENSION, AsgiWriter, Receive, Scope, Send
from skiff_runtime.api.http.responses import get_request_id, get_response_headers


class Exchange:
    """One request and its response. ``id`` is the request's; ``headers`` are those that every response to it carries."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self.id = get_request_id(scope)
        self.headers = get_response_headers(scope)
        write_chunk = scope.get("extensions", {}).get(CHUNK_WRITER_EXTENSION)
        self.writer = AsgiWriter(send, on_overflow=self._cancel, write_chunk=write_chunk)
        self._task = asyncio.current_task()

    async def wait_until_over(self, receive: Receive) -> None:
        """Wait until the response is complete, or the client has disconnected or reads too slowly."""
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        except asyncio.CancelledError:
            if not self.writer.closed:
                raise
            log.warning("slow_client_disconnected", id=self.id)

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()
