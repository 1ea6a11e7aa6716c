"""Limits on connections: how many, how slow a request's head may come, how large it may be."""

import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from typing import cast

import pytest
from frontend import TIMEOUT_SECONDS
from plain_server import GET, LIMIT, ask, connect, listen, response, serving, until_closed
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
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has little patience with a head."""
    monkeypatch.setattr(protocol, "HEAD_TIMEOUT_SECONDS", HEAD_SECONDS)


@contextmanager
def said_before_it_opens(words: bytes) -> Iterator[socket.socket]:
    """A connection whose first words wait for the server to start, lest a stall between the two use its patience up."""
    listener = listen()
    with closing(connect(listener.getsockname())) as connection:
        connection.sendall(words)
        with serving(listener):
            yield connection


def test_beyond_the_limit_only_probes_are_served(address: Address) -> None:
    held = [connect(address) for _ in range(LIMIT)]
    assert all(ask(each).startswith(b"HTTP/1.1 200") for each in held)
    with closing(connect(address)) as another:
        refused = ask(another) + until_closed(another)
        assert (
            refused.startswith(b"HTTP/1.1 503")
            and b"retry-after" in refused
            and b"x-request-id: abc" in refused
        )
    with closing(connect(address)) as probe:
        assert ask(probe, "/readyz").startswith(b"HTTP/1.1 200")
    held.pop().close()
    wait_for_room(address)
    for each in held:
        assert ask(each).startswith(b"HTTP/1.1 200")
        each.close()


def wait_for_room(address: Address) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        with closing(connect(address)) as connection:
            if ask(connection).startswith(b"HTTP/1.1 200"):
                return
        assert time.monotonic() < deadline


def test_far_beyond_the_limit_nobody_is(address: Address) -> None:
    held = [connect(address) for _ in range(LIMIT + EXTRA_PROBE_CONNECTIONS)]
    assert ask(held[-1], "/livez").startswith(b"HTTP/1.1 200")
    with closing(connect(address)) as another:
        answer = until_closed(another)
    assert answer.startswith(b"HTTP/1.1 503") and b"\r\nretry-after: 1\r\n" in answer
    for each in held:
        each.close()


@pytest.mark.usefixtures("hurried")
def test_a_connection_on_which_nothing_comes_is_ended_without_a_word() -> None:
    with said_before_it_opens(b"") as connection:
        assert until_closed(connection) == b""


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("begun", [b"\r\n", b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"])
def test_a_slow_head_is_refused(begun: bytes) -> None:
    with said_before_it_opens(begun) as connection:
        refused_as_late(until_closed(connection))


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("begun", [b"\r\n", b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"])
def test_a_slow_head_after_a_request_is_refused(begun: bytes) -> None:
    with said_before_it_opens(GET.format("/v1/models").encode()) as connection:
        assert response(connection).startswith(b"HTTP/1.1 200")
        connection.sendall(begun)
        refused_as_late(until_closed(connection))


def refused_as_late(answer: bytes) -> None:
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive in time" in answer


@pytest.mark.usefixtures("hurried")
def test_a_head_that_trickles_in_gets_no_more_time() -> None:
    with said_before_it_opens(b"G") as connection:
        answer = b""
        connection.settimeout(HEAD_SECONDS / 10)
        for byte in GET.format("/" + "x" * 1000).encode()[1:]:
            try:
                connection.sendall(bytes([byte]))
                answer = connection.recv(4096)
                break
            except TimeoutError:
                continue
    refused_as_late(answer)


def test_a_head_without_end_is_refused(address: Address) -> None:
    with closing(connect(address)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"x: " + b"y" * MAX_HEAD_BYTES)
        assert until_closed(connection).startswith(b"HTTP/1.1 431")


@pytest.mark.parametrize("upgrade", ["Upgrade: h2c", "upgrade: websocket", "UPGRADE:h2c"])
def test_an_offer_of_another_protocol_is_ignored(address: Address, upgrade: str) -> None:
    head = f"POST /echo HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\n{upgrade}\r\nhost: localhost\r\ncontent-length: 18"
    with closing(connect(address)) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n\r\nupgrade: 7 hello")
        answer = response(connection)
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\nupgrade: 7 hello")


@pytest.mark.usefixtures("hurried")
def test_a_slow_body_behind_an_early_reply_draws_no_second_one() -> None:
    with said_before_it_opens(
        b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
    ) as connection:
        early = response(connection)
        connection.sendall(b"x")
        assert until_closed(connection) == b""
        assert b"\r\nconnection: close\r\n" in early


def test_a_fault_of_ours_is_told_without_its_reason(address: Address) -> None:
    with closing(connect(address)) as connection:
        connection.sendall(
            b"POST /broken HTTP/1.1\r\nhost: localhost\r\nx-request-id: abc\r\ncontent-length: 0\r\n\r\n"
        )
        answer = response(connection)
        assert answer.startswith(b"HTTP/1.1 500") and b"x-request-id: abc" in answer
        assert b"internal_error" in answer and b"secret" not in answer
        assert ask(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.usefixtures("hurried")
def test_an_idle_connection_between_requests_is_kept() -> None:
    with said_before_it_opens(GET.format("/v1/models").encode()) as connection:
        assert response(connection).startswith(b"HTTP/1.1 200")
        time.sleep(2 * HEAD_SECONDS)
        assert ask(connection).startswith(b"HTTP/1.1 200")


def test_the_head_waits_for_the_body_but_not_without_end(address: Address) -> None:
    """Neither a request for the head alone, nor one that waits for 100 Continue, hangs."""
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


def test_head_and_body_are_one_write() -> None:
    written: list[bytes] = []
    transport = SimpleNamespace(write=written.append, close=lambda: written.append(b"closed"))
    cycle = SimpleNamespace(transport=transport, response_started=False)
    joined = cycle.transport = HeadCoalescer(cast(RequestResponseCycle, cycle))
    joined.write(b"continue ")
    cycle.response_started = True
    joined.write(b"head ")
    assert written == [b"continue "]
    joined.write(b"body")
    assert written == [b"continue ", b"head body"] and cycle.transport is transport
    other = HeadCoalescer(cast(RequestResponseCycle, cycle))
    other.write(b"head")
    other.close()
    assert written[2:] == [b"head", b"closed"]
