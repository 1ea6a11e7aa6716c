"""The transport between processes: ZeroMQ PUSH/PULL sockets over ipc:// in the service's private directory.

The receiver binds, senders connect. No send blocks for ever: a peer that has not read for
``SEND_TIMEOUT_SECONDS`` is an error, which ends the sending process.
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec
import zmq

from skiff_runtime.errors import SkiffError
from skiff_runtime.messages import MAX_MESSAGE_BYTES, decoder, encode

QUEUE_MESSAGES: Final = 100_000
SEND_TIMEOUT_SECONDS: Final = 20.0
LINGER_SECONDS: Final = 1.0

T = TypeVar("T")


class TransportError(SkiffError):
    """A peer process does not read its messages."""


class MessageNotEncodable(SkiffError):
    """MessagePack cannot express a value of a message, which JSON and Python can. The error says which values."""

    def __init__(self) -> None:
        super().__init__(
            "it has an integer of more than 64 bits, or half of a surrogate pair; send smaller integers and valid Unicode"
        )


class Endpoints:
    """The addresses of the sockets of one service."""

    def __init__(self, run_dir: Path) -> None:
        self._base = f"ipc://{run_dir}"

    @property
    def supervisor(self) -> str:
        return f"{self._base}/supervisor"

    @property
    def api(self) -> str:
        return f"{self._base}/api"

    @property
    def detokenizer(self) -> str:
        return f"{self._base}/detokenizer"

    def tokenizer(self, index: int) -> str:
        return f"{self._base}/tokenizer{index}"

    def rank(self, index: int) -> str:
        return f"{self._base}/rank{index}"


def bind(address: str) -> zmq.Socket[bytes]:
    """Make a bounded PULL socket that listens at ``address``."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, QUEUE_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(address)
    return socket


class Sender:
    """Sends messages to one address."""

    def __init__(self, address: str, *, timeout_seconds: float = SEND_TIMEOUT_SECONDS) -> None:
        self._address = address
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        self._socket.setsockopt(zmq.SNDTIMEO, int(timeout_seconds * 1000))
        self._socket.setsockopt(zmq.LINGER, int(LINGER_SECONDS * 1000))
        self._socket.connect(address)

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message.

        Raises:
            MessageNotEncodable: The message has a value that cannot be encoded; nothing is queued.
            TransportError: The peer has stopped reading.
        """
        try:
            data = encode(message)
        except (OverflowError, UnicodeEncodeError):
            raise MessageNotEncodable from None
        self.send_encoded(data)

    def send_encoded(self, data: bytes) -> None:
        """Queue a message that is encoded. Raises ``TransportError`` if the peer has stopped reading."""
        try:
            self._socket.send(data)
        except zmq.Again:
            name = self._address.rsplit("/", 1)[-1]
            raise TransportError(f"{name} does not read its messages: it hangs or is overloaded") from None

    def try_send(self, message: msgspec.Struct) -> None:
        """Queue one message unless the queue is full: for messages that may be lost, such as heartbeats."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


def send_to_all(senders: Iterable[Sender], message: msgspec.Struct) -> None:
    """Queue one message at each of ``senders``; it is encoded once. Raises ``TransportError`` as they do."""
    data = encode(message)
    for sender in senders:
        sender.send_encoded(data)


def close_sockets() -> None:
    """Close every socket of this process after its queued messages have left, or after ``LINGER_SECONDS``."""
    zmq.Context.instance().destroy(linger=int(LINGER_SECONDS * 1000))


class Receiver(Generic[T]):
    """Receives messages of one union type at one address."""

    def __init__(self, address: str, kind: object) -> None:
        self.socket = bind(address)
        self._decode: msgspec.msgpack.Decoder[T] = decoder(kind)

    def receive(self, timeout_seconds: float) -> T | None:
        """Wait for the next message and return it; None if none arrives in time."""
        if not self.socket.poll(int(timeout_seconds * 1000)):
            return None
        return self._decode.decode(self.socket.recv())

    def drain(self, limit: int, max_bytes: int = MAX_MESSAGE_BYTES) -> list[T]:
        """Return messages that have arrived already, in their order. Never waits.

        They are at most ``limit``, and none follows when those before it have ``max_bytes`` together.
        """
        messages: list[T] = []
        size = 0
        while len(messages) < limit and size < max_bytes:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                break
            size += len(data)
            messages.append(self._decode.decode(data))
        return messages

    def close(self) -> None:
        self.socket.close()
