"""The HTTP server of a process: uvicorn with this package's protocol and limits, and the end of its connections in a drain."""

import contextlib
from collections.abc import Iterator

import uvicorn

from skiff_runtime.api.http.listener import KEEP_ALIVE_SECONDS, LISTEN_BACKLOG, raise_file_limit
from skiff_runtime.api.http.middleware import AccessMiddleware
from skiff_runtime.api.http.protocol import HttpProtocol, HttpServerConfig


class HttpServer(uvicorn.Server):
    """uvicorn's server without its signal handlers: its process handles signals itself."""

    config: HttpServerConfig

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def begin_closing(self) -> None:
        """End each connection behind its next response, or behind the one that is under way."""
        self.config.closing = True
        for connection in self._connections():
            connection.end_after_response()

    def close_idle_connections(self) -> None:
        """Close the connections that carry no request, and each other one behind its response."""
        for connection in self._connections():
            connection.close_when_idle()

    def _connections(self) -> list[HttpProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, HttpProtocol)]


def make_http_server(app: AccessMiddleware, *, max_connections: int, close_seconds: int) -> HttpServer:
    """Return a server of ``app``.

    ``max_connections`` is lowered to what the limit on open files allows. ``close_seconds``: time that clients have to read
    what is already written when the server exits.
    """
    return HttpServer(
        HttpServerConfig(
            app,
            max_connections=min(max_connections, raise_file_limit()),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=LISTEN_BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=close_seconds,
        )
    )
