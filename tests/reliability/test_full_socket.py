"""A peer that does not read fills its socket: senders get an error in time, and heartbeats are dropped."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skiff_runtime.messages import Heartbeat, ToSupervisor, transport
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender, TransportError

MESSAGE = Heartbeat(process="x" * 1000)
MORE_THAN_FIT = 10_000


@pytest.fixture
def endpoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoints]:
    monkeypatch.setattr(transport, "QUEUE_MESSAGES", 8)
    with tempfile.TemporaryDirectory() as directory:
        yield Endpoints(Path(directory))


def fill(sender: Sender) -> int:
    """Send until a message is refused; return the number sent."""
    for sent in range(MORE_THAN_FIT):
        try:
            sender.send(MESSAGE)
        except TransportError as error:
            assert "supervisor does not read its messages" in str(error)
            return sent
    raise AssertionError("nothing limits the messages queued for a peer that does not read")


def test_full_socket_is_an_error_that_loses_no_queued_message(endpoints: Endpoints) -> None:
    inbox: Receiver[Heartbeat] = Receiver(endpoints.supervisor, ToSupervisor)
    sender = Sender(endpoints.supervisor, timeout_seconds=0.2)
    try:
        sent = fill(sender)
        sender.try_send(MESSAGE)  # returns at once
        received = 0
        while inbox.receive(0.5) is not None:
            received += 1
        assert received == sent
        sender.send(MESSAGE)
        assert inbox.receive(5) == MESSAGE
    finally:
        sender.close()
        inbox.close()


def test_peer_that_never_binds_is_an_error(endpoints: Endpoints) -> None:
    sender = Sender(endpoints.supervisor, timeout_seconds=0.2)
    try:
        assert fill(sender) == transport.QUEUE_MESSAGES
    finally:
        sender.close()
