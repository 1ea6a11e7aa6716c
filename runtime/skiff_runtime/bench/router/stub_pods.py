"""A process of stub pods: HTTP servers that answer as a pod does, at a cost that is small beside a router's.

A stub answers chat and text completions with a fixed text, or with a stream of one event every ``EVENT_SECONDS``, whose number is
the request's ``max_tokens``. It remembers the blocks of all prompts, as a KV cache without limits does, reports them as
``GET /events``, and counts those that it had. Run as a module, it listens on the ports that it is given:

    python -m skiff_runtime.bench.router.stub_pods PORT...
"""

import asyncio
import sys
from typing import Final, cast

import httptools
import msgspec
import uvloop

from skiff_runtime import contract
from skiff_runtime.prompt_blocks import hash_body
from skiff_runtime.state_events import HEARTBEAT, HEARTBEAT_SECONDS, PodLoad, PromptBlocksChanged, Snapshot

MODEL: Final = "bench"
EVENT_SECONDS: Final = 0.01
STATISTICS_PATH: Final = "/statistics"
_MAX_BODY_BYTES: Final = 1 << 20
_LOAD: Final = PodLoad(
    max_requests=4096,
    max_running=4096,
    max_step_tokens=8192,
    step_seconds=0.004,
    prefill_token_seconds=2.5e-5,
    bytes_per_token=4.0,
)
_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%b\r\n"
_JSON: Final = b"application/json"
_STREAM_HEAD: Final = _HEAD % (b"text/event-stream", b"transfer-encoding: chunked\r\n")
_CHUNK: Final = (
    b'{"id":"chatcmpl-stub","object":"chat.completion.chunk","created":1767312000,"model":"bench",'
    b'"choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}'
)
_COMPLETION: Final = (
    b'{"id":"chatcmpl-stub","object":"chat.completion","created":1767312000,"model":"bench","choices":[{"index":0,'
    b'"message":{"role":"assistant","content":"A pod is a group of containers."},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":500,"completion_tokens":8,"total_tokens":508}}'
)
_MODELS: Final = (
    b'{"object":"list","data":[{"id":"bench","object":"model","created":1767312000,"owned_by":"stub",'
    b'"max_model_len":131072}]}'
)
_ROUTER_QUESTIONS: Final = b'{"status":"ok","model":"bench","model_path":"bench","served_model_name":"bench"}'
"""Routers ask pods for their health and their model in several ways."""


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_EVENT: Final = _chunk(b"data: " + _CHUNK + b"\n\n")
_END: Final = _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Statistics(msgspec.Struct):
    """Requests of a stub pod, the blocks of their prompts, and those blocks that an earlier request had brought."""

    requests: int = 0
    blocks: int = 0
    cached: int = 0


class _Request(msgspec.Struct):
    stream: bool = False
    max_tokens: int = 1


_DECODER: Final = msgspec.json.Decoder(_Request)


class StubPod:
    """One pod: its statistics, its blocks, and the routers that follow it."""

    def __init__(self) -> None:
        self.statistics = Statistics()
        self._blocks: set[int] = set()
        self._followers: dict[asyncio.Transport, int] = {}

    def record(self, body: bytes) -> None:
        """Count a request, and report the blocks that are new."""
        blocks = hash_body(body, b"")
        names = blocks.names() if blocks is not None else []
        new = [name for name in names if name not in self._blocks]
        statistics = self.statistics
        statistics.requests += 1
        statistics.blocks += len(names)
        statistics.cached += len(names) - len(new)
        if new:
            self._blocks.update(new)
            self._report(msgspec.json.encode(PromptBlocksChanged(stored=new, removed=[])))

    def follow(self, transport: asyncio.Transport) -> None:
        """Begin a stream of events."""
        snapshot = Snapshot(
            instance="stub",
            model=MODEL,
            state="ready",
            block_size=16,
            kv_tokens=1_000_000,
            isolates_keys=False,
            load=_LOAD,
            prompt_blocks=list(self._blocks),
        )
        self._followers[transport] = 0
        transport.write(_STREAM_HEAD)
        self._send(transport, msgspec.json.encode(snapshot))

    def leave(self, transport: asyncio.Transport) -> None:
        """End a stream of events, if this is one."""
        self._followers.pop(transport, None)

    def beat(self) -> None:
        """Send a comment to each follower."""
        for transport in self._followers:
            transport.write(_chunk(HEARTBEAT))

    def reset(self) -> None:
        """Begin new statistics, with an empty cache."""
        self.statistics = Statistics()
        removed, self._blocks = list(self._blocks), set()
        if removed:
            self._report(msgspec.json.encode(PromptBlocksChanged(stored=[], removed=removed)))

    def _report(self, event: bytes) -> None:
        for transport in self._followers:
            self._send(transport, event)

    def _send(self, transport: asyncio.Transport, event: bytes) -> None:
        number = self._followers[transport]
        self._followers[transport] = number + 1
        transport.write(_chunk(b"id: %d\ndata: %b\n\n" % (number, event)))


class Streams:
    """All streams of the process, each with the number of events that it still gets; one timer writes them."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Transport, int] = {}

    def begin(self, transport: asyncio.Transport, events: int) -> None:
        """Begin a stream with its first event."""
        transport.write(_STREAM_HEAD + _EVENT + (_END if events <= 1 else b""))
        if events > 1:
            self._left[transport] = events - 1

    def end(self, transport: asyncio.Transport) -> None:
        """Forget a stream whose client has left."""
        self._left.pop(transport, None)

    async def run(self) -> None:
        """Write an event to each stream in every interval."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due += EVENT_SECONDS
            await asyncio.sleep(max(0.0, due - loop.time()))
            for transport, left in list(self._left.items()):
                transport.write(_EVENT if left > 1 else _EVENT + _END)
                if left > 1:
                    self._left[transport] = left - 1
                else:
                    del self._left[transport]


class _Protocol(asyncio.Protocol):
    """One connection to a stub pod."""

    def __init__(self, pod: StubPod, streams: Streams) -> None:
        self._pod = pod
        self._streams = streams
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._target = b""
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._streams.end(self._transport)
            self._pod.leave(self._transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        self._target = b""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > _MAX_BODY_BYTES:
            raise httptools.HttpParserError("the body is too large")

    def on_message_complete(self) -> None:
        assert self._transport is not None
        method, path = self._parser.get_method(), self._target.partition(b"?")[0].decode("latin-1")
        if method == b"POST" and path in (contract.PATH_CHAT_COMPLETIONS, contract.PATH_COMPLETIONS):
            self._complete()
        elif path == contract.PATH_EVENTS:
            self._pod.follow(self._transport)
        elif path == STATISTICS_PATH:
            self._answer(msgspec.json.encode(self._pod.statistics))
            if method == b"DELETE":
                self._pod.reset()
        else:
            self._answer(_MODELS if path == contract.PATH_MODELS else _ROUTER_QUESTIONS)

    def _complete(self) -> None:
        assert self._transport is not None
        body = bytes(self._body)
        request = _DECODER.decode(body)
        self._pod.record(body)
        if request.stream:
            self._streams.begin(self._transport, request.max_tokens)
        else:
            self._answer(_COMPLETION)

    def _answer(self, body: bytes) -> None:
        assert self._transport is not None
        self._transport.write(_HEAD % (_JSON, b"content-length: %d\r\n" % len(body)) + body)


async def serve(ports: list[int]) -> None:
    """Run a stub pod on each port of loopback, for ever."""
    loop, streams = asyncio.get_running_loop(), Streams()
    pods = [StubPod() for _ in ports]
    for pod, port in zip(pods, ports, strict=True):
        await loop.create_server(lambda pod=pod: _Protocol(pod, streams), "127.0.0.1", port, backlog=1024)  # type: ignore[misc]
    async with asyncio.TaskGroup() as group:
        group.create_task(streams.run())
        group.create_task(_beat(pods))


async def _beat(pods: list[StubPod]) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        for pod in pods:
            pod.beat()


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[1:]]))
