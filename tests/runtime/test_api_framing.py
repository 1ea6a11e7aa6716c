"""The framing of requests on one connection: each byte belongs to exactly one request, which gets exactly one reply."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from front import NAME, TIMEOUT_SECONDS, Echo, running_front, write_model
from strict_replies import StrictReply, read_replies, read_reply
from wire import Address, address_of

ID: Final = "x-request-id: mine\r\n"
GET: Final = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-request-id: second\r\n\r\n"
LAST: Final = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nx-request-id: last\r\nconnection: close\r\n\r\n"
QUESTION: Final = {"model": NAME, "prompt": "hello world", "max_tokens": 20}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """One set of front processes, whose rank repeats each prompt."""
    model: Path = write_model(tmp_path_factory.mktemp("model"))
    with running_front(model) as front:
        echo = Echo(front.rank)
        echo.start()
        yield address_of(front.url)
        echo.stop()


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, TIMEOUT_SECONDS)


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", "host: x", "x-request-id: mine", *lines, "", ""]
    ).encode()


def completion(*lines: str, stream: bool = False) -> bytes:
    """A whole request for text."""
    body = json.dumps({**QUESTION, "stream": stream}).encode()
    return head("POST", "/v1/completions", f"content-length: {len(body)}", *lines) + body


def talk(address: Address, *pieces: bytes, methods: tuple[str, ...] = ("POST",)) -> list[StrictReply]:
    """Every reply to ``pieces``, up to the end of the connection, which the server must bring about."""
    with closing(connect(address)) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return read_replies(connection, methods)


def is_refused(reply: StrictReply, status: int, request_id: str | None = "mine") -> None:
    """An error in OpenAI's shape, after which the connection ends."""
    assert reply.status == status, reply
    error = json.loads(reply.body)["error"]
    assert error["message"] and {"type", "param", "code"} < set(error)
    assert reply.headers["connection"] == "close"
    assert reply.headers["x-request-id"] == (request_id or reply.headers["x-request-id"])


@pytest.mark.parametrize("path", ["/nowhere", "/v1/models", "/v1/completions"])
def test_a_body_behind_an_early_reply_is_never_a_request(address: Address, path: str) -> None:
    lines = ["x-request-timeout-seconds: none"] if path == "/v1/completions" else []
    smuggled = head("GET", "/v1/models")
    smuggled = head("GET", "/v1/models", f"pad: {'x' * (94 - len(smuggled))}")
    body = b"\r\nupgrade: x" * (len(smuggled) // 10) + smuggled
    with closing(connect(address)) as connection:
        connection.sendall(head("POST", path, f"content-length: {len(body)}", *lines))
        first = read_reply(connection, "POST")
        connection.sendall(body)
        rest = read_replies(connection, ("GET",))
    assert first.status in (400, 404, 405) and first.headers["x-request-id"] == "mine"
    assert rest == []


def test_a_long_body_behind_an_early_reply_draws_no_second_one(address: Address) -> None:
    with closing(connect(address)) as connection:
        connection.sendall(head("POST", "/nowhere", "content-length: 200000"))
        assert read_reply(connection, "POST").status == 404
        for _ in range(10):
            connection.sendall(b"x" * 20_000)
        assert read_replies(connection, ("POST",)) == []


def test_a_blank_line_and_a_body_that_come_together(address: Address) -> None:
    body = b'{"a":\r\nupgrade: 1}'
    with closing(connect(address)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start = head("POST", "/v1/completions", f"content-length: {len(body)}")
        connection.sendall(start[:-2])
        assert_quiet(connection)
        connection.sendall(start[-2:] + body)
        reply = read_reply(connection, "POST")
        assert reply.status == 400 and "JSON" in json.loads(reply.body)["error"]["message"]
        connection.sendall(LAST)
        assert [each.status for each in read_replies(connection, ("GET",))] == [200]


def assert_quiet(connection: socket.socket) -> None:
    """Nothing comes for a moment."""
    connection.settimeout(0.1)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.settimeout(TIMEOUT_SECONDS)
