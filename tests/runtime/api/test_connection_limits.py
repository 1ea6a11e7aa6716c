"""Limits on connections: their number, and the time and size of a request's head."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
from frontend import TIMEOUT_SECONDS
from plain_server import GET, LIMIT, connect, get_response, listen, response, serving, until_closed
from raw_http import Address
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from skiff_runtime.api.http import protocol
from skiff_runtime.api.http.framing import MAX_HEAD_BYTES
from skiff_runtime.api.http.protocol import EXTRA_PROBE_CONNECTIONS
from skiff_runtime.api.http.response_cycle import HeadCoalescer

HEAD_SECONDS = 0.3


@pytest.fixture
def address() -> Iterator[Address]:
    listener = listen()
    with serving(listener):
        yield listener.getsockname()


@pytest.fixture
def short_head_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeout of a request's head."""
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_SECONDS", HEAD_SECONDS)


@contextmanager
def connect_before_start(data: bytes) -> Iterator[socket.socket]:
    """Return a connection whose first bytes were sent before the server started.

    So no stall between connecting and sending uses up the timeout.
    """
    listener = listen()
    with closing(connect(listener.getsockname())) as connection:
        connection.sendall(data)
        with serving(listener):
            yield connection


def test_beyond_limit_only_probes_are_served(address: Address) -> None:
    held = [connect(address) for _ in range(LIMIT)]
    assert all(get_response(each).startswith(b"HTTP/1.1 200") for each in held)
    with closing(connect(address)) as another:
        rejected = get_response(another) + until_closed(another)
        assert (
            rejected.startswith(b"HTTP/1.1 503")
            and b"retry-after" in rejected
            and b"x-request-id: abc" in rejected
        )
    with closing(connect(address)) as probe:
        assert get_response(probe, "/readyz").startswith(b"HTTP/1.1 200")
    held.pop().close()
    wait_for_capacity(address)
    for each in held:
        assert get_response(each).startswith(b"HTTP/1.1 200")
        each.close()


def wait_for_capacity(address: Address) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        with closing(connect(address)) as connection:
            if get_response(connection).startswith(b"HTTP/1.1 200"):
                return
        assert time.monotonic() < deadline


def test_far_beyond_limit_connections_are_closed(address: Address) -> None:
    held = [connect(address) for _ in range(LIMIT + EXTRA_PROBE_CONNECTIONS)]
    assert get_response(held[-1], "/livez").startswith(b"HTTP/1.1 200")
    with closing(connect(address)) as another:
        answer = until_closed(another)
    assert answer.startswith(b"HTTP/1.1 503") and b"\r\nretry-after: 1\r\n" in answer
    for each in held:
        each.close()


@pytest.mark.usefixtures("short_head_timeout")
def test_silent_connection_is_closed_without_response() -> None:
    with connect_before_start(b"") as connection:
        assert until_closed(connection) == b""


@pytest.mark.usefixtures("short_head_timeout")
@pytest.mark.parametrize("head", [b"\r\n", b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"])
def test_slow_head_gets_408(head: bytes) -> None:
    with connect_before_start(head) as connection:
        assert_timed_out(until_closed(connection))


@pytest.mark.usefixtures("short_head_timeout")
@pytest.mark.parametrize("head", [b"\r\n", b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"])
def test_slow_head_after_a_request_gets_408(head: bytes) -> None:
    with connect_before_start(GET.format("/v1/models").encode()) as connection:
        assert response(connection).startswith(b"HTTP/1.1 200")
        connection.sendall(head)
        assert_timed_out(until_closed(connection))


def assert_timed_out(data: bytes) -> None:
    assert data.startswith(b"HTTP/1.1 408") and b"did not arrive in time" in data


@pytest.mark.usefixtures("short_head_timeout")
def test_trickling_head_does_not_extend_timeout() -> None:
    with connect_before_start(b"G") as connection:
        answer = b""
        connection.settimeout(HEAD_SECONDS / 10)
        for byte in GET.format("/" + "x" * 1000).encode()[1:]:
            try:
                connection.sendall(bytes([byte]))
                answer = connection.recv(4096)
                break
            except TimeoutError:
                continue
    assert_timed_out(answer)


def test_endless_head_gets_431(address: Address) -> None:
    with closing(connect(address)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * MAX_HEAD_BYTES)
        assert until_closed(connection).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("upgrade", ["Upgrade: h2c", "upgrade: websocket", "UPGRADE:h2c"])
def test_upgrade_offer_is_ignored(address: Address, upgrade: str) -> None:
    head = f"POST /echo HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n{upgrade}\r\nhost: localhost\r\ncontent-length: 18"
    with closing(connect(address)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n\r\nupgrade: 7 hello")
        answer = response(connection)
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\nupgrade: 7 hello")


@pytest.mark.usefixtures("short_head_timeout")
def test_slow_body_after_early_response_gets_no_second_response() -> None:
    with connect_before_start(
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
    ) as connection:
        early = response(connection)
        connection.sendall(b"x")
        assert until_closed(connection) == b""
        assert b"\r\nconnection: close\r\n" in early


def test_unexpected_exception_gets_500_without_details(address: Address) -> None:
    with closing(connect(address)) as connection:
        connection.sendall(
            b"POST /broken HTTP/1.1\r\nhost: localhost\r\nx-request-id: abc\r\ncontent-length: 0\r\n\r\n"
        )
        answer = response(connection)
        assert answer.startswith(b"HTTP/1.1 500") and b"x-request-id: abc" in answer
        assert b"internal_error" in answer and b"secret" not in answer
        assert get_response(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("short_head_timeout")
def test_idle_connection_between_requests_is_kept() -> None:
    with connect_before_start(GET.format("/v1/models").encode()) as connection:
        assert response(connection).startswith(b"HTTP/1.1 200")
        time.sleep(2 * HEAD_SECONDS)
        assert get_response(connection).startswith(b"HTTP/1.1 200")


def test_coalesced_head_never_blocks_a_response(address: Address) -> None:
    """Neither a HEAD request nor one that waits for 100 Continue hangs."""
    with closing(connect(address)) as connection:
        connection.sendall(b"HEAD /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
        answer = connection.recv(4096)
        assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n")
        connection.sendall(
            b"POST /echo HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n"
        )
        assert connection.recv(4096) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"hello")
        assert connection.recv(4096).endswith(b"\r\n\r\nhello")


def test_head_and_body_are_written_together() -> None:
    written: list[bytes] = []
    transport = SimpleNamespace(write=written.append, close=lambda: written.append(b"closed"))
    cycle = SimpleNamespace(transport=transport, response_started=False)
    coalescer = cycle.transport = HeadCoalescer(cast(RequestResponseCycle, cycle))
    coalescer.write(b"continue ")
    cycle.response_started = True
    coalescer.write(b"head ")
    assert written == [b"continue "]
    coalescer.write(b"body")
    assert written == [b"continue ", b"head body"] and cycle.transport is transport
    other = HeadCoalescer(cast(RequestResponseCycle, cycle))
    other.write(b"head")
    other.close()
    assert written[2:] == [b"head", b"closed"]
