"""A pod for tests of the router: an HTTP server on loopback whose answers a test chooses, down to their bytes and pauses."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from skiff_router.upstream import Address
from skiff_runtime.state_events import HEARTBEAT, HEARTBEAT_SECONDS, PodLoad, Snapshot, StateEvent

READY = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok\n"
DRAINING = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


SNAPSHOT = Snapshot(
    instance="1",
    model="a",
    state="ready",
    block_size=16,
    kv_tokens=100_000,
    isolates_keys=False,
    load=PodLoad(max_requests=1000, max_running=100, max_step_tokens=2048),
    prompt_blocks=[],
)


@dataclass(frozen=True)
class PodRequest:
    """A request that a pod received."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


Answer = Callable[[PodRequest, asyncio.StreamWriter], Awaitable[None]]
"""Writes a response; closing the writer or leaving it open is its choice."""


def chunk(data: bytes) -> bytes:
    """Return a piece of a chunked body; b"" ends it."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    """Return a server-sent event as one chunk."""
    return chunk(f"data: {text}\n\n".encode())


def json_response(body: bytes, status: str = "200 OK") -> bytes:
    """Return a whole response with a JSON body."""
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


@dataclass(eq=False)
class EventStream:
    """One stream of a pod's events."""

    writer: asyncio.StreamWriter
    number: int = 0

    def send(self, event: StateEvent) -> None:
        """Send the next event."""
        data = msgspec.json.encode(event)
        self.writer.write(chunk(b"id: %d\ndata: %b\n\n" % (self.number, data)))
        self.number += 1


@dataclass(eq=False)
class FakePod:
    """One pod. ``answer`` handles all but probes of readiness, which ``probe`` answers; ``hangs`` answers nothing at all."""

    answer: Answer
    probe: bytes = READY
    hangs: bool = False
    reports: bool = False
    """``/events`` is served: a snapshot, what ``report`` is called with, and comments. Otherwise it is a 404."""
    requests: list[PodRequest] = field(default_factory=list)
    event_targets: list[str] = field(default_factory=list)
    """Targets of the requests for ``/events``."""
    left: int = 0
    """Connections that the router ended while a request was in progress."""
    address: Address = Address("127.0.0.1", 0)
    snapshot: Snapshot = SNAPSHOT
    _server: asyncio.Server | None = None
    _streams: list["EventStream"] = field(default_factory=list)
    _writers: dict[asyncio.StreamWriter, None] = field(default_factory=dict)

    async def start(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._server = await asyncio.start_server(self._serve, *self.address)
        self.address = Address(*self._server.sockets[0].getsockname()[:2])

    async def stop(self) -> None:
        """Stop listening and reset every connection."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        self._server = None

    def report(self, event: StateEvent) -> None:
        """Send an event to every router that follows this pod, and begin later streams with it if it is a snapshot."""
        if isinstance(event, Snapshot):
            self.snapshot = event
        for stream in self._streams:
            stream.send(event)

    async def _stream_events(self, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD)
        stream = EventStream(writer)
        stream.send(self.snapshot)
        self._streams.append(stream)
        try:
            while not writer.transport.is_closing():
                await asyncio.sleep(HEARTBEAT_SECONDS / 2)
                if not self.hangs:
                    writer.write(chunk(HEARTBEAT))
        finally:
            self._streams.remove(stream)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers[writer] = None
        try:
            while True:
                request = await _read_request(reader)
                if self.hangs:
                    await asyncio.Event().wait()
                if request.target == "/readyz":
                    writer.write(self.probe)
                    continue
                if request.target.startswith("/events"):
                    self.event_targets.append(request.target)
                    if self.reports:
                        await self._stream_events(writer)
                    writer.write(json_response(b"{}", "404 Not Found"))
                    continue
                self.requests.append(request)
                await self.answer(request, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            del self._writers[writer]
            writer.close()


@contextlib.asynccontextmanager
async def pods(*answers: Answer) -> AsyncIterator[list[FakePod]]:
    """Run a pod for each answer."""
    started = [FakePod(answer) for answer in answers]
    for pod in started:
        await pod.start()
    try:
        yield started
    finally:
        for pod in started:
            with contextlib.suppress(AssertionError):
                await pod.stop()


async def _read_request(reader: asyncio.StreamReader) -> PodRequest:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return PodRequest(method, target, headers, body)
