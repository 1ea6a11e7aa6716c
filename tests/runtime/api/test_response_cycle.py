"""Whole responses, complete bodies and disconnects without ASGI messages, against the bytes that a client sees."""

import asyncio
import gc
import socket
import threading
import weakref
from collections.abc import Iterator

import pytest
from plain_server import connect, listen, serving

from skiff_runtime.api.http.asgi import (
    BODY_EXTENSION,
    DISCONNECT_EXTENSION,
    WHOLE_RESPONSE_EXTENSION,
    Receive,
    Scope,
    Send,
)

BODY = b"0123456789"
HEADERS = [(b"content-length", b"10"), (b"x-odd", b"a: b")]
REQUEST = b"POST /whole HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n"


class Marker:
    """An object that lives as long as the scope of its request."""


class Whole:
    """An application that writes a whole response, and else uses ASGI messages."""

    def __init__(self) -> None:
        self.headers = HEADERS
        self.attempts = self.refusals = 0
        self.bodies: list[bytes | None] = []
        self.markers: list[weakref.ref[Marker]] = []
        self.left = threading.Event()
        self.waits = False
        self.waiting = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        extensions = scope["extensions"]
        self.bodies.append(extensions[BODY_EXTENSION](1 << 20))
        if self.waits:
            while self.bodies[-1] is None and (await receive())["more_body"]:
                pass
            left = asyncio.Event()
            extensions[DISCONNECT_EXTENSION].watch(left.set)
            self.waiting.set()
            await left.wait()
            self.left.set()
            return
        scope["marker"] = Marker()
        self.markers.append(weakref.ref(scope["marker"]))
        write = extensions[WHOLE_RESPONSE_EXTENSION]
        self.attempts += 1
        if not write(200, self.headers, BODY):
            self.refusals += 1
            await send({"type": "http.response.start", "status": 200, "headers": self.headers})
            await send({"type": "http.response.body", "body": BODY, "more_body": False})


@pytest.fixture
def app() -> Whole:
    return Whole()


@pytest.fixture
def connection(app: Whole) -> Iterator[socket.socket]:
    listener = listen()
    with serving(listener, posts={"/whole": app}), connect(listener.getsockname()[:2]) as connection:
        yield connection


def exchange(connection: socket.socket, request: bytes) -> bytes:
    connection.sendall(request)
    data = b""
    while not data.endswith(BODY):
        piece = connection.recv(4096)
        assert piece, data
        data += piece
    return data


def test_whole_response_is_one_message_and_the_connection_goes_on(
    app: Whole, connection: socket.socket
) -> None:
    for _ in range(2):
        head, _, body = exchange(connection, REQUEST + b"\r\n{}").partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        assert lines[0] == b"HTTP/1.1 200 OK"
        assert {b"content-length: 10", b"x-odd: a: b"} <= set(lines)
        assert body == BODY
    assert (app.attempts, app.refusals) == (2, 0)
    assert app.bodies == [b"{}", b"{}"]


def test_pipelined_requests_are_answered_in_order(app: Whole, connection: socket.socket) -> None:
    connection.sendall((REQUEST + b"\r\n{}") * 3)
    data = b""
    while data.count(BODY) < 3:
        data += connection.recv(4096)
    assert data.count(b"HTTP/1.1 200 OK\r\n") == 3
    assert (app.attempts, app.refusals) == (3, 0)


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(REQUEST + b"connection: close\r\n\r\n{}", id="last-request"),
        pytest.param(REQUEST.replace(b"1.1", b"1.0") + b"\r\n{}", id="http-1.0"),
    ],
)
def test_responses_that_end_their_connection_go_the_general_way(
    app: Whole, connection: socket.socket, request_bytes: bytes
) -> None:
    head = exchange(connection, request_bytes)
    assert b"connection: close\r\n" in head
    assert connection.recv(1) == b""
    assert (app.attempts, app.refusals) == (1, 1)


@pytest.mark.parametrize("value", [b"a\r\nset-cookie: b", b"a\nb", b"a\rb"])
def test_header_of_several_lines_is_never_written(
    app: Whole, connection: socket.socket, value: bytes
) -> None:
    app.headers = [*HEADERS, (b"x-evil", value)]
    connection.sendall(REQUEST + b"\r\n{}")
    data = b""
    while piece := connection.recv(4096):
        data += piece
    assert (app.attempts, app.refusals) == (1, 1)
    assert b" 500 " in data.split(b"\r\n")[0] or not data
    assert b"set-cookie" not in data and b"x-evil" not in data


def test_body_that_arrives_in_pieces_is_received(app: Whole, connection: socket.socket) -> None:
    connection.sendall(REQUEST + b"expect: 100-continue\r\n\r\n")
    assert exchange(connection, b"").endswith(BODY)
    assert app.bodies == [None]


def test_leaving_is_noticed_behind_a_body_for_which_reading_paused(
    app: Whole, connection: socket.socket
) -> None:
    app.waits = True
    size = 100_000  # arrives at once, and is more than the server reads ahead
    connection.sendall(REQUEST.replace(b"length: 2", b"length: %d" % size) + b"\r\n" + bytes(size))
    assert app.waiting.wait(10)
    connection.close()
    assert app.left.wait(10)


def test_requests_leave_no_reference_cycle(app: Whole, connection: socket.socket) -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            exchange(connection, REQUEST + b"\r\n{}")
        # The connection keeps its newest request.
        assert [each() for each in app.markers[:-1]] == [None, None]
    finally:
        gc.enable()
