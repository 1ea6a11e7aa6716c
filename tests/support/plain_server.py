"""The API's HTTP protocol around trivial applications, in a thread of the test, so that a test can change its limits."""

import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import uvicorn
from frontend import TIMEOUT_SECONDS
from raw_http import Address

from skiff_runtime.api.http.asgi import App, Receive, Scope, Send
from skiff_runtime.api.http.auth import AccessPolicy
from skiff_runtime.api.http.middleware import AccessMiddleware
from skiff_runtime.api.http.protocol import HttpServerConfig
from skiff_runtime.api.http.request_body import BodyReader
from skiff_runtime.api.http.responses import send_response
from skiff_runtime.config import Config

LIMIT: Final = 4
GET: Final = "GET {} HTTP/1.1\r\nhost: localhost\r\nx-request-id: abc\r\n\r\n"
LARGE_BYTES: Final = 16 << 20
WAITING: Final = threading.Event()
"""Set by ``wait`` when it has its request."""
DISCONNECTED: Final = threading.Event()
"""Set by ``wait`` when its client has disconnected."""


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await send_response(scope, send, 200, b"hello")


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    await send_response(scope, send, 200, await BodyReader(1000, max_values=0).read(scope, receive))


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise KeyError("secret detail")


async def wait(scope: Scope, receive: Receive, send: Send) -> None:
    """Send no response, and wait for the client to disconnect."""
    while (await receive())["type"] != "http.disconnect":
        WAITING.set()
    DISCONNECTED.set()


async def large(scope: Scope, receive: Receive, send: Send) -> None:
    await send_response(scope, send, 200, bytes(LARGE_BYTES))


def listen() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=128)


@contextmanager
def serving(listener: socket.socket, posts: Mapping[str, App] | None = None) -> Iterator[None]:
    """Run a server with a limit of ``LIMIT`` connections; ``posts`` are more applications."""
    middleware = AccessMiddleware(
        hello,
        posts={"/broken": broken, "/echo": echo, "/large": large, "/wait": wait, **(posts or {})},
        access=AccessPolicy.from_config(Config(host="0.0.0.0")),
        on_rejected=lambda status: None,
    )
    config = HttpServerConfig(
        middleware,
        max_connections=LIMIT,
        ws="none",
        lifespan="off",
        log_config=None,
        timeout_keep_alive=int(TIMEOUT_SECONDS),
        timeout_graceful_shutdown=1,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, TIMEOUT_SECONDS)


def get_response(connection: socket.socket, path: str = "/v1/models") -> bytes:
    """Send a GET request, and return the whole response."""
    connection.sendall(GET.format(path).encode())
    return response(connection)


def response(connection: socket.socket) -> bytes:
    """Read to the end of the response of ``hello``, or of an error."""
    data = b""
    while not data.endswith((b"hello", b"}}")):
        piece = connection.recv(4096)
        assert piece, f"the connection ended after {data!r}"
        data += piece
    return data


def until_closed(connection: socket.socket) -> bytes:
    text = b""
    while piece := connection.recv(4096):
        text += piece
    return text
