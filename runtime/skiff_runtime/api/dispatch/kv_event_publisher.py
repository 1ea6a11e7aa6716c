"""The publisher of KV cache events in vLLM's ZeroMQ format (``--kv-events-config``), for routers that read that.

Every step whose results report changes of KV blocks makes one batch. A PUB socket sends it as three frames: the topic, the
batch's number (8 bytes, big-endian, from 0), and the batch in MessagePack, whose structs are arrays as in vLLM. The latest
batches are kept, and a ROUTER socket repeats them from the number that a subscriber names.

Sending never waits: ZeroMQ drops what a slow subscriber has no room for. The subscriber notices the gap in the numbers, and
asks for a replay.
"""

import asyncio
import time
from collections import deque
from typing import Final

import msgspec
import numpy as np
import zmq
from msgspec import Struct

from skiff_runtime import log
from skiff_runtime.config import Config
from skiff_runtime.config.kv_events import KVEventsConfig
from skiff_runtime.errors import ConfigError
from skiff_runtime.messages import CacheEvents, KVBlocksRemoved, KVBlocksStored, Wire

END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)
"""Number of the message behind the last one of a replay."""
NUMBER_BYTES: Final = 8
REPLAY_TICK_SECONDS: Final = 0.25


class BlockStored(Struct, frozen=True, array_like=True, tag=True):
    """Consecutive KV blocks of ``block_size`` tokens entered the cache, behind ``parent_block_hash``.

    ``lora_id`` and ``lora_name``: of the adapter that computed them, None for the base model.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str = "GPU"
    lora_name: str | None = None


class BlockRemoved(Struct, frozen=True, array_like=True, tag=True):
    """KV blocks left the cache."""

    block_hashes: list[int]
    medium: str = "GPU"


class AllBlocksCleared(Struct, frozen=True, array_like=True, tag=True):
    """The cache holds no KV block but those that follow."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True):
    """The changes of one step in their order. ``ts``: seconds since 1970."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = 0


class KVEventPublisher:
    """The two sockets, and the batches that can be replayed. All methods belong to one thread."""

    def __init__(self, config: KVEventsConfig, block_size: int) -> None:
        """Open the sockets.

        Raises:
            ConfigError: An address cannot be used; the message names its key.
        """
        self._topic = config.topic.encode()
        self._block_size = block_size
        self._encode = msgspec.msgpack.Encoder().encode
        self._next = 0
        self._batches: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._publishing = _open(zmq.PUB, config.endpoint, config.hwm, "endpoint", listens=config.listens)
        self._replaying: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        if config.replay_endpoint is not None:
            # Room for one whole replay to each subscriber; what does not fit is dropped, as it is by the other socket.
            room = config.buffer_steps + 1
            try:
                self._replaying = _open(
                    zmq.ROUTER, config.replay_endpoint, room, "replay_endpoint", listens=True
                )
            except ConfigError:
                self._publishing.close()
                raise

    def publish(self, events: CacheEvents) -> None:
        """Send the changes of KV blocks of one step, if there are any. Never waits."""
        changes: list[KVEvent] = [AllBlocksCleared()] if events.is_snapshot else []
        changes += map(self._convert, events.blocks)
        if not changes:
            return
        number = self._next.to_bytes(NUMBER_BYTES, "big")
        self._next += 1
        payload = self._encode(EventBatch(time.time(), changes))
        self._batches.append((number, payload))
        self._publishing.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def _convert(self, event: KVBlocksStored | KVBlocksRemoved) -> KVEvent:
        if isinstance(event, KVBlocksRemoved):
            return BlockRemoved(event.hashes)
        token_ids = np.frombuffer(event.token_ids, Wire.TOKEN).tolist()
        return BlockStored(
            event.hashes,
            event.parent,
            token_ids,
            self._block_size,
            lora_id=event.adapter_id or None,
            lora_name=event.adapter_name or None,
        )

    def answer_replays(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer requests for replays from now on, in ``loop``."""
        if self._replaying is not None:
            self._loop = loop
            loop.add_reader(self._replaying.fileno(), self._answer_all)
            self._tick()

    def _tick(self) -> None:
        # ZeroMQ's descriptor signals a change once, not that messages are left, so a wake-up can be missed.
        self._answer_all()
        assert self._loop is not None
        self._timer = self._loop.call_later(REPLAY_TICK_SECONDS, self._tick)

    def _answer_all(self) -> None:
        while self.answer_replay():
            pass

    def answer_replay(self) -> bool:
        """Answer one request for a replay, and return whether there was one.

        A request has the frames [b"", number]; each batch from that number on is sent as [b"", number, payload], and
        [b"", ``END_OF_REPLAY``, b""] after them.
        """
        assert self._replaying is not None
        try:
            subscriber, *request = self._replaying.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        if len(request) != 2 or len(request[1]) != NUMBER_BYTES:
            log.warning("kv_replay_malformed", frames=len(request))
            return True
        first = request[1]  # of equal lengths, so their order is that of the numbers
        for number, payload in [each for each in self._batches if each[0] >= first]:
            self._replaying.send_multipart((subscriber, b"", number, payload), zmq.NOBLOCK)
        self._replaying.send_multipart((subscriber, b"", END_OF_REPLAY, b""), zmq.NOBLOCK)
        return True

    def close(self) -> None:
        """Close the sockets; what is not sent yet is dropped."""
        if self._timer is not None:
            self._timer.cancel()
        if self._replaying is not None:
            if self._loop is not None:
                self._loop.remove_reader(self._replaying.fileno())
            self._replaying.close(linger=0)
        self._publishing.close(linger=0)


def make_kv_event_publisher(config: Config) -> KVEventPublisher | None:
    """Return the publisher that the configuration asks for, or None.

    Raises:
        ConfigError: An address cannot be used.
    """
    if config.kv_events_config is None:
        return None
    events = KVEventsConfig.parse(config.kv_events_config)
    return KVEventPublisher(events, config.page_size) if events.is_enabled else None


def _open(kind: int, address: str, limit: int, key: str, *, listens: bool) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
    socket.set_hwm(limit)
    try:
        (socket.bind if listens else socket.connect)(address)
    except zmq.ZMQError as error:
        socket.close()
        raise ConfigError(f"--kv-events-config: {key} {address!r} cannot be used: {error.strerror}") from None
    return socket
