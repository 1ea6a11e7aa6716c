"""AsgiWriter: order is kept for slow clients, and a client that does not read is disconnected."""

import asyncio
from typing import Any

from skiff_runtime.api.http import asgi
from skiff_runtime.api.http.asgi import AsgiWriter, Message


class Server:
    """Provides a ``send`` that waits while the connection is full, like that of an HTTP server."""

    def __init__(self) -> None:
        self.written: list[Message] = []
        self.open = asyncio.Event()
        self.open.set()
        self.overflows = 0

    async def send(self, message: Message) -> None:
        if not self.open.is_set():
            await self.open.wait()
        self.written.append(message)

    def overflow(self) -> None:
        self.overflows += 1

    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.written)

    def ended(self) -> bool:
        return self.written[-1].get("more_body") is False


def run(scenario: Any) -> None:
    asyncio.run(scenario)


def test_message_is_sent_at_once() -> None:
    async def scenario() -> None:
        server = Server()
        writer = AsgiWriter(server.send, on_overflow=server.overflow)
        writer.start(200, [])
        writer.body(b"a", more=True)
        writer.body(b"b", more=False)
        assert [m["type"].rpartition(".")[2] for m in server.written] == ["start", "body", "body"]
        assert server.ended()

    run(scenario())


def test_slow_client_gets_everything_in_order() -> None:
    async def scenario() -> None:
        server = Server()
        writer = AsgiWriter(server.send, on_overflow=server.overflow)
        writer.start(200, [])
        expected = b""
        for turn in range(50):
            (server.open.clear if turn % 5 == 1 else server.open.set)()
            for piece in range(3):
                data = f"{turn}.{piece} ".encode()
                expected += data
                writer.body(data, more=True)
            await asyncio.sleep(0)
        writer.body(b"end", more=False)
        server.open.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert server.body() == expected + b"end"
        assert server.ended() and server.overflows == 0
        assert [m["more_body"] for m in server.written[1:]].count(False) == 1

    run(scenario())


def test_headers_may_have_to_wait() -> None:
    async def scenario() -> None:
        server = Server()
        server.open.clear()
        writer = AsgiWriter(server.send, on_overflow=server.overflow)
        writer.start(200, [])
        writer.body(b"all", more=False)
        assert server.written == []
        server.open.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert [m["type"].rpartition(".")[2] for m in server.written] == ["start", "body"]
        assert server.body() == b"all"

    run(scenario())


def test_client_that_does_not_read_overflows_once() -> None:
    async def scenario() -> None:
        server = Server()
        writer = AsgiWriter(server.send, on_overflow=server.overflow)
        writer.start(200, [])
        server.open.clear()
        piece = bytes(64 << 10)
        for _ in range(3 * asgi.MAX_BACKLOG_BYTES // len(piece)):
            writer.body(piece, more=True)
        assert server.overflows == 1 and writer.closed
        server.open.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(server.body()) == len(piece)

    run(scenario())


def test_backlog_limit_can_be_raised() -> None:
    """Log-probabilities of a long prompt arrive at once, and are larger than any backlog of tokens."""

    async def scenario() -> None:
        server = Server()
        writer = AsgiWriter(server.send, on_overflow=server.overflow)
        writer.start(200, [])
        server.open.clear()
        piece = bytes(2 * asgi.MAX_BACKLOG_BYTES)
        for _ in range(3):
            writer.raise_backlog_limit(len(piece))
            writer.body(piece, more=True)
        assert server.overflows == 0
        for _ in range(8):
            writer.body(piece, more=True)
        assert server.overflows == 1

    run(scenario())


def test_chunks_bypass_asgi_unless_a_send_waits() -> None:
    async def scenario() -> None:
        server = Server()
        direct: list[bytes] = []

        def chunk(data: bytes) -> bool:
            if server.open.is_set():
                direct.append(data)
                server.written.append({"type": "http.response.body", "body": data})
            return server.open.is_set()

        writer = AsgiWriter(server.send, on_overflow=server.overflow, write_chunk=chunk)
        writer.start(200, [])
        writer.body(b"a", more=True)
        writer.body(b"", more=True)
        server.open.clear()
        writer.body(b"b", more=True)
        server.open.set()
        writer.body(b"c", more=True)
        await asyncio.sleep(0.01)
        writer.body(b"d", more=True)
        writer.body(b"e", more=False)
        assert direct == [b"a", b"d"], "b waited, and c must not overtake it"
        assert server.body() == b"abcde" and server.ended()

    run(scenario())
