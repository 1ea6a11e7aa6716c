"""Lingering close: the last response arrives, and no client keeps its connection open for ever."""

import asyncio
import errno
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Final, cast
from unittest.mock import Mock

import pytest
from frontend import TIMEOUT_SECONDS
from plain_server import DISCONNECTED, GET, LARGE_BYTES, WAITING, connect, listen, serving, until_closed
from raw_http import Address

from skiff_runtime.api.http import lingering_close
from skiff_runtime.api.http.protocol import READ_AHEAD_REQUESTS

LINGER_SECONDS: Final = 0.2


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """Run a server that lingers for a short time."""
    monkeypatch.setattr(lingering_close, "LINGER_SECONDS", LINGER_SECONDS)
    listener = listen()
    with serving(listener):
        yield listener.getsockname()


@pytest.mark.parametrize("pipelined", [0, 1, READ_AHEAD_REQUESTS])
def test_disconnect_reaches_request_being_served(address: Address, pipelined: int) -> None:
    WAITING.clear()
    DISCONNECTED.clear()
    with closing(connect(address)) as connection:
        connection.sendall(b"POST /wait HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n")
        assert WAITING.wait(TIMEOUT_SECONDS)
        for _ in range(pipelined):
            connection.sendall(GET.format("/v1/models").encode())
    assert DISCONNECTED.wait(TIMEOUT_SECONDS)


def test_client_that_never_closes_is_disconnected(address: Address) -> None:
    with closing(connect(address)) as connection:
        connection.sendall(GET.format("/v1/models").replace("host:", "connection: close\r\nhost:").encode())
        assert until_closed(connection).endswith(b"hello")
        with pytest.raises(OSError):
            while True:  # until the reset has arrived
                connection.sendall(b"x")
                time.sleep(LINGER_SECONDS / 10)


def test_client_that_never_stops_sending_is_disconnected(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lingering_close, "LINGER_BYTES", 1 << 20)
    with closing(connect(address)) as connection:
        connection.sendall(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000000\r\n\r\n")
        with pytest.raises(OSError):
            for _ in range(1000):
                connection.sendall(bytes(100_000))


def test_last_response_may_take_longer_than_linger_time(
    address: Address,
) -> None:
    with closing(connect(address)) as connection:
        connection.sendall(b"POST /large HTTP/1.0\r\ncontent-length: 0\r\n\r\n")
        received = 0
        while piece := connection.recv(LARGE_BYTES // 20):
            received += len(piece)
            time.sleep(LINGER_SECONDS / 10)
    assert received > LARGE_BYTES


def test_connection_that_was_reset_is_aborted() -> None:
    transport = Mock(spec=asyncio.Transport)
    transport.is_closing.return_value = False
    transport.write_eof.side_effect = OSError(errno.ENOTCONN, "not connected")
    lingering_close.LingeringClose(transport, cast(asyncio.AbstractEventLoop, None)).begin()
    transport.abort.assert_called_once_with()
