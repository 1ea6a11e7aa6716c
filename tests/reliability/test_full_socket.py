"""A peer that reads nothing fills its socket: whoever sends to it gets an error in time, and beats are just dropped."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from skiff_runtime.messages import Heartbeat, ToSupervisor, transport
from skiff_runtime.messages.transport import Endpoints, Receiver, Sender, TransportError

MESSAGE = Heartbeat(process="x" * 1000)
MORE_THAN_FITS = 10_000


@pytest.fixture
def endpoints(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoints]:
    monkeypatch.setattr(transport, "QUEUE_MESSAGES", 8)
    with tempfile.TemporaryDirectory() as directory:
        yield Endpoints(Path(directory))


def fill(sender: Sender) -> int:
    """How many messages went before one was refused."""
    for sent in range(MORE_THAN_FITS):
        try:
            sender.send(MESSAGE)
        except TransportError as error:
            assert "supervisor does not read its messages" in str(error)
            return sent
    raise AssertionError("nothing limits what waits for a peer that does not read")


def test_a_full_socket_is_an_error_and_its_messages_are_not_lost(endpoints: Endpoints) -> None:
    inbox: Receiver[Heartbeat] = Receiver(endpoints.supervisor, ToSupervisor)
    sender = Sender(endpoints.supervisor, timeout_seconds=0.2)
    try:
        sent = fill(sender)
        sender.offer(MESSAGE)  # returns at once
        received = 0
        while inbox.receive(0.5) is not None:
            received += 1
        assert received == sent
        sender.send(MESSAGE)
        assert inbox.receive(5) == MESSAGE
    finally:
        sender.close()
        inbox.close()


def test_a_peer_that_never_came_is_an_error_too(endpoints: Endpoints) -> None:
    sender = Sender(endpoints.supervisor, timeout_seconds=0.2)
    try:
        assert fill(sender) == transport.QUEUE_MESSAGES
    finally:
        sender.close()
