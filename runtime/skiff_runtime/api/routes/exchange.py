"""One HTTP exchange whose response is written from callbacks, while the request's own task waits for its end."""

import asyncio

from skiff_runtime import log
from skiff_runtime.api.http.asgi import (
    CHUNK_WRITER_EXTENSION,
    TRAILERS_EXTENSION,
    AsgiWriter,
    Receive,
    Scope,
    Send,
    TrailedSend,
)
from skiff_runtime.api.http.request_headers import get_header
from skiff_runtime.api.http.responses import get_request_id, get_response_headers
from skiff_runtime.api.http.usage_header import USAGE_HEADER


class Exchange:
    """One request and its response. ``id`` is the request's; ``headers`` are those that every response to it carries.

    ``trailed``: its ``send``, if the request asks for ``X-Skiff-Usage``.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self.id = get_request_id(scope)
        self.headers = get_response_headers(scope)
        extensions = scope.get("extensions", {})
        self.trailed: TrailedSend | None = None
        if get_header(scope["headers"], USAGE_HEADER) and TRAILERS_EXTENSION in extensions:
            self.trailed = send = extensions[TRAILERS_EXTENSION]()
        write_chunk = extensions.get(CHUNK_WRITER_EXTENSION)
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
