"""The client's side of a response whose connection still writes the response before."""

import asyncio
from typing import Any, cast

from skiff_router.relay import ClientWriter
from skiff_router.upstream import UpstreamConnection
from skiff_runtime.api.http.asgi import CHUNK_WRITER_EXTENSION, WHOLE_RESPONSE_EXTENSION, Message

HEAD = (200, [(b"content-type", b"text/event-stream")])


class SlowConnection:
    """A server's side of a connection: its ``send`` waits until the client has read the response before."""

    def __init__(self) -> None:
        self.may_write = asyncio.Event()
        self.sent: list[Any] = []
        extensions = {CHUNK_WRITER_EXTENSION: self._write_chunk, WHOLE_RESPONSE_EXTENSION: lambda *_: False}
        self.writer = ClientWriter({"extensions": extensions}, self._send, [])

    async def _send(self, message: Message) -> None:
        await self.may_write.wait()
        self.sent.append(message.get("status", message.get("body")))

    def _write_chunk(self, data: bytes) -> bool:
        self.sent.append(data)
        return True


class Source:
    """A pod's connection, which is read or paused."""

    is_paused = False

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False


def test_head_and_pieces_wait_in_order_and_the_pod_is_not_read() -> None:
    async def test() -> None:
        connection, source = SlowConnection(), Source()
        connection.writer.begin(*HEAD, cast(UpstreamConnection, source))
        connection.writer.write(b"one")
        connection.writer.write(b"two")
        assert connection.sent == [] and source.is_paused
        connection.may_write.set()
        await connection.writer.end()
        assert connection.sent == [200, b"onetwo", b""] and not source.is_paused

    asyncio.run(test())


def test_events_that_begin_before_a_pod_has_the_request_wait_as_well() -> None:
    async def test() -> None:
        connection, source = SlowConnection(), Source()
        connection.writer.begin_events()
        connection.writer.write(b": waiting\n\n")
        connection.writer.begin(*HEAD, cast(UpstreamConnection, source))
        assert source.is_paused, "the pod's events would pile up"
        connection.may_write.set()
        await connection.writer.end()
        assert connection.sent == [200, b": waiting\n\n", b""] and not source.is_paused

    asyncio.run(test())
