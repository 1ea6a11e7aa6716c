"""A connection to a pod that is reused while its last exchange is still being ended: neither disturbs the other."""

import asyncio
from typing import Any

from fake_pod import STREAM_HEAD, PodRequest, chunk, event, json_response, pods
from routers import run

from skiff_router.relay import ClientWriter, Relay, Reply, Streamed
from skiff_router.upstream import ConnectionPool, UpstreamConnection
from skiff_runtime.api.http.asgi import CHUNK_WRITER_EXTENSION, WHOLE_RESPONSE_EXTENSION

WAIT_SECONDS = 10


class SlowClient:
    """A client that reads nothing until ``reads`` is set."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.received = b""

    def writer(self) -> ClientWriter:
        scope: dict[str, Any] = {
            "extensions": {
                CHUNK_WRITER_EXTENSION: lambda data: False,
                WHOLE_RESPONSE_EXTENSION: lambda status, headers, body: False,
            }
        }
        return ClientWriter(scope, self._send, [])

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.body":
            await self.reads.wait()
            self.received += message["body"]


def request(path: str) -> tuple[bytes]:
    return (f"GET {path} HTTP/1.1\r\nhost: pod\r\n\r\n".encode(),)


async def outcome(relay: Relay) -> Any:
    async with asyncio.timeout(WAIT_SECONDS):
        return await relay.outcome


async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    """Stream two events and the end at once, or respond a little later."""
    if request.target == "/stream":
        writer.write(STREAM_HEAD + event("one") + event("two") + chunk(b""))
    else:
        await asyncio.sleep(0.1)
        writer.write(json_response(b"{}"))


async def reuse(pool: ConnectionPool, connection: UpstreamConnection, path: str) -> Relay:
    """Send the next request on a connection whose exchange has ended."""
    assert pool.take_idle() is connection
    relay = Relay(SlowClient().writer(), connection)
    connection.send(request(path), relay)
    return relay


def test_client_that_leaves_late_does_not_end_the_next_exchange() -> None:
    """Its request is cancelled when its response is complete already, and another one has the connection."""

    async def test() -> None:
        async with pods(answer) as (pod,):
            pool = ConnectionPool(pod.address)
            connection = await pool.connect()
            first = Relay(SlowClient().writer(), connection)
            connection.send(request("/json"), first)
            assert isinstance(await outcome(first), Reply)
            second = await reuse(pool, connection, "/json")
            connection.abort(first)
            assert isinstance(await outcome(second), Reply)
            third = await reuse(pool, connection, "/json")
            connection.abort(third)
            assert pool.take_idle() is None and not third.outcome.done()

    run(test())


def test_slow_client_does_not_stop_the_next_exchange_of_its_connection() -> None:
    async def test() -> None:
        async with pods(answer) as (pod,):
            pool, slow = ConnectionPool(pod.address), SlowClient()
            connection, writer = await pool.connect(), slow.writer()
            first = Relay(writer, connection)
            connection.send(request("/stream"), first)
            assert isinstance(await outcome(first), Streamed)
            second = await reuse(pool, connection, "/json")
            assert isinstance(await outcome(second), Reply), "the pod's connection is read"
            slow.reads.set()
            await writer.end()
            assert slow.received == b"data: one\n\ndata: two\n\n"

    run(test())
