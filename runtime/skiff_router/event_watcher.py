"""Streams of events from pods: their load and cached prefixes, their drain at once, and their silence.

A pod sends something every ``HEARTBEAT_SECONDS``. One that is silent for ``SILENCE_SECONDS`` is passed over as long as
another pod is not, but nothing of it is failed: the prober decides about that, which waits longer. A server without
``/events`` is routed by this router's own requests.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import msgspec

from skiff_router.endpoints import Endpoint, Registry
from skiff_router.upstream import ConnectionPool, Headers, UpstreamConnection, UpstreamError, format_get
from skiff_runtime import contract, log
from skiff_runtime.state_events import HEARTBEAT, INCLUDE_PROMPT_BLOCKS, Snapshot, StateEvent

SILENCE_SECONDS: Final = 0.15
CHECK_SECONDS: Final = 0.05
RETRY_SECONDS: Final = (0.1, 2.0)
"""Delay before the next attempt to connect: the first, doubled each time, and the longest."""
UNSUPPORTED_RETRY_SECONDS: Final = 30.0
FIRST_EVENT_SECONDS: Final = 2.0
MAX_EVENT_BYTES: Final = 1 << 24
_DECODER: Final["msgspec.json.Decoder[StateEvent]"] = msgspec.json.Decoder(StateEvent)


class StreamFault(Exception):
    """The stream is not what it should be."""


class EventReader:
    """Splits the bytes of a stream into events, and checks their numbers."""

    def __init__(self) -> None:
        self._rest = b""
        self._number = 0

    def feed(self, data: bytes) -> list[StateEvent]:
        """Return the events that ``data`` completes; comments are dropped.

        Raises:
            StreamFault: An event is malformed or too long, the first is no snapshot, or events are missing.
        """
        if data == HEARTBEAT and not self._rest:
            return []
        *texts, self._rest = (self._rest + data).split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamFault(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [self._parse(text) for text in texts if not text.startswith(b":")]

    def _parse(self, text: bytes) -> StateEvent:
        head, _, data = text.partition(b"\ndata: ")
        if head != b"id: %d" % self._number:
            raise StreamFault(f"event {self._number} is missing")
        try:
            event = _DECODER.decode(data)
        except msgspec.DecodeError as error:
            raise StreamFault(f"an event cannot be read: {error}") from None
        if isinstance(event, Snapshot) != (self._number == 0):
            raise StreamFault("the stream does not begin with one snapshot")
        self._number += 1
        return event


class _EventStreamReceiver:
    """The receiver of one stream. ``over``: its result is the status of the response, its exception why it ended."""

    def __init__(self, endpoint: Endpoint, connection: UpstreamConnection) -> None:
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.first = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._endpoint = endpoint
        self._connection = connection
        self._reader = EventReader()
        self._status = 0

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_data(self, data: bytes) -> None:
        if self._status != 200:
            return
        endpoint, now = self._endpoint, self._loop.time()
        try:
            events = self._reader.feed(data)
        except StreamFault as fault:
            self._connection.abort(self)
            self._end(fault)
            return
        was_accepting = endpoint.pod.accepts_requests
        for event in events:
            endpoint.pod.apply(event, now)
        if not events:
            endpoint.pod.record_report(now)
        endpoint.last_event_at = now
        endpoint.silent = False
        if events:
            self.first.set()
            if was_accepting and not endpoint.pod.accepts_requests:
                log.event("pod_not_ready", pod=endpoint.name)
                endpoint.drain()

    def on_end(self) -> None:
        self._end(StreamFault("the pod ended the stream") if self._status == 200 else None)

    def on_failure(self, error: UpstreamError) -> None:
        self._end(error)

    def _end(self, error: Exception | None) -> None:
        self.first.set()
        if self.over.done():
            return
        if error is None:
            self.over.set_result(self._status)
        else:
            self.over.set_exception(error)


class EventWatcher:
    """Follows every pod of a registry."""

    def __init__(self, registry: Registry, router_id: str, get_key: Callable[[], str] = str) -> None:
        """``router_id``: the one in the headers of this router's requests. ``get_key``: returns the API key for a request;
        Skiff's own pods need none.
        """
        self._registry = registry
        self._router_id = router_id
        self._get_key = get_key
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Follow the pods for ever."""
        loop = asyncio.get_running_loop()
        checked_at = loop.time()
        try:
            while True:
                self._update()
                now = loop.time()
                # If this process was busy, events of the meantime wait to be read, and silence is its own fault.
                if now - checked_at < 2 * CHECK_SECONDS:
                    self._find_silent(now)
                checked_at = now
                await asyncio.sleep(CHECK_SECONDS)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _update(self) -> None:
        """Begin to follow new pods, and end with those that are gone."""
        endpoints = {endpoint: None for backend in self._registry.backends for endpoint in backend.endpoints}
        for gone in [endpoint for endpoint in self._tasks if endpoint not in endpoints]:
            self._tasks.pop(gone).cancel()
        for endpoint in endpoints:
            if endpoint not in self._tasks:
                self._tasks[endpoint] = asyncio.get_running_loop().create_task(self._follow(endpoint))

    def _find_silent(self, now: float) -> None:
        for endpoint in self._tasks:
            if endpoint.pod.load is not None and now - endpoint.last_event_at > SILENCE_SECONDS:
                if not endpoint.silent:
                    log.event("pod_silent", pod=endpoint.name)
                endpoint.silent = True

    async def _follow(self, endpoint: Endpoint) -> None:
        """Follow one pod, again and again, until cancelled."""
        pool = ConnectionPool(endpoint.address)
        first_delay, longest_delay = RETRY_SECONDS
        delay = first_delay
        try:
            while True:
                try:
                    status = await self._read_stream(endpoint, pool)
                except (UpstreamError, StreamFault) as error:
                    # Nothing was known before the first event; a stream that was lost is the first sign of a dead pod.
                    endpoint.silent = endpoint.pod.load is not None or endpoint.silent
                    if endpoint.pod.load is not None:
                        log.event("pod_events_lost", pod=endpoint.name, reason=error)
                        delay = first_delay
                else:
                    endpoint.silent = False  # it answers, if only with an error
                    delay = UNSUPPORTED_RETRY_SECONDS if status in (401, 404, 405) else delay
                endpoint.pod.forget()
                await asyncio.sleep(delay)
                delay = min(longest_delay, 2 * delay)
        finally:
            pool.close()

    async def _read_stream(self, endpoint: Endpoint, pool: ConnectionPool) -> int:
        """Return the status of a response that is no stream.

        Raises:
            UpstreamError: The stream broke off, or could not begin.
            StreamFault: It has ended, or is not a stream of events.
        """
        connection = await pool.connect()
        follower = _EventStreamReceiver(endpoint, connection)
        target = f"{contract.PATH_EVENTS}?include={INCLUDE_PROMPT_BLOCKS}&router={self._router_id}"
        connection.send((format_get(endpoint.address, target, self._get_key()),), follower)
        try:
            async with asyncio.timeout(FIRST_EVENT_SECONDS):
                await follower.first.wait()
            return await follower.over
        except TimeoutError:
            raise StreamFault(f"no event within {FIRST_EVENT_SECONDS:g} s") from None
        finally:
            connection.abort(follower)
