"""KV events over ZeroMQ: a subscriber rebuilds the cache's content from the stream, and gets what it missed replayed."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import pytest
import zmq
from cache_mirror import CacheMirror
from frontend import running_frontend, write_model
from scheduler_bench import EOS, SchedulerBench, generate

from skiff_runtime.api.dispatch.kv_event_publisher import (
    END_OF_REPLAY,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventPublisher,
)
from skiff_runtime.config import Config
from skiff_runtime.config.kv_events import KVEventsConfig
from skiff_runtime.errors import ConfigError
from skiff_runtime.kvcache.block_hash import hash_blocks
from skiff_runtime.messages import CacheEvents, FlushCache, KVBlocksRemoved, KVBlocksStored, WatchCache

TIMEOUT_MS: Final = 30_000
WATCH: Final = WatchCache(prompts=False, blocks=True, tokens=True)
REMOVED: Final = CacheEvents(False, b"", b"", [KVBlocksRemoved([7])])
Batches = list[tuple[int, bytes]]


def config_of(directory: Path, **keys: object) -> str:
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "endpoint": f"ipc://{directory}/events",
            "replay_endpoint": f"ipc://{directory}/replay",
            **keys,
        }
    )


@contextmanager
def publishing(directory: Path, **keys: object) -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(KVEventsConfig.parse(config_of(directory, **keys)), block_size=4)
    try:
        yield publisher
    finally:
        publisher.close()


@contextmanager
def connected(kind: int, address: str) -> "Iterator[zmq.Socket[bytes]]":
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(address)
        yield socket


def replay(directory: Path, first: int, answer: Callable[[], bool] | None = None) -> Batches:
    """Return the batches that a replay from number ``first`` on yields. ``answer`` has the publisher answer in this thread."""
    with connected(zmq.DEALER, f"ipc://{directory}/replay") as socket:
        socket.send_multipart([b"", first.to_bytes(8, "big")])
        while answer is not None and not answer():
            pass
        batches: Batches = []
        while True:
            empty, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == END_OF_REPLAY:
                return batches
            batches.append((int.from_bytes(number, "big"), payload))


class Subscriber:
    """A cache as a router rebuilds it from the batches: the parent and the tokens of each block."""

    def __init__(self, batches: Batches) -> None:
        self.blocks: dict[int, tuple[int | None, list[int]]] = {}
        for _, payload in batches:
            for event in msgspec.msgpack.decode(payload, type=EventBatch).events:
                self._apply(event)

    def _apply(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        match event:
            case BlockStored():
                parent, size = event.parent_block_hash, event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                for index, block in enumerate(event.block_hashes):
                    self.blocks[block] = parent, event.token_ids[index * size : (index + 1) * size]
                    parent = block
            case BlockRemoved():
                for block in event.block_hashes:
                    del self.blocks[block]
            case AllBlocksCleared():
                self.blocks.clear()


class PublishedBench(SchedulerBench):
    """A scheduler with a radix cache, whose events are published and applied to a mirror."""

    def __init__(self, publisher: KVEventPublisher, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.mirror = CacheMirror()
        self._publisher = publisher

    def turn(self) -> bool:
        runs_on = self.scheduler.turn()
        for batch in self.channel.sent:
            self.mirror.apply(batch.cache_events)
            if batch.cache_events is not None:
                self._publisher.publish(batch.cache_events)
            self.replies.take(batch)
            self.stats.append(batch.stats)
        self.channel.sent.clear()
        return runs_on


def test_replayed_stream_equals_the_content_of_the_cache(tmp_path: Path) -> None:
    """Prompts share prefixes and do not fit together, so blocks are stored, evicted, and stored again."""
    random = np.random.default_rng(3)
    heads = random.integers(0, EOS, (4, 24))
    with publishing(tmp_path) as publisher:
        bench = PublishedBench(publisher, num_pages=32, max_running_requests=2)
        bench.put(generate(0, heads[0].tolist()))
        bench.finish()
        bench.put(WATCH)
        for uid in range(1, 40):
            tail = random.integers(0, EOS, int(random.integers(1, 20)))
            bench.put(generate(uid, [*heads[uid % 4].tolist(), *tail.tolist()]))
            bench.finish()
        batches = replay(tmp_path, 0, publisher.answer_replay)
        assert [number for number, _ in batches] == list(range(len(batches)))
        known = Subscriber(batches)
        assert known.blocks.keys() == bench.mirror.blocks
        for block, (parent, tokens) in known.blocks.items():
            assert hash_blocks(np.array(tokens, np.int32), 4, parent=parent) == [block]
        events = [
            event for _, each in batches for event in msgspec.msgpack.decode(each, type=EventBatch).events
        ]
        assert isinstance(events[0], AllBlocksCleared)
        assert any(isinstance(event, BlockRemoved) for event in events)
        bench.put(FlushCache(1))
        bench.turn()
        rest = replay(tmp_path, len(batches), publisher.answer_replay)
        assert Subscriber(batches + rest).blocks == {} and rest[0][0] == len(batches)


def test_batches_have_vllms_format(tmp_path: Path) -> None:
    stored = KVBlocksStored([5, 6], None, np.arange(8, dtype=np.int32).tobytes())
    with publishing(tmp_path) as publisher:
        publisher.publish(CacheEvents(True, b"", b"", [stored, KVBlocksRemoved([6])]))
        publisher.publish(CacheEvents(False, b"12345678", b"", []))  # prompt blocks alone make no batch
        [(number, payload)] = replay(tmp_path, 0, publisher.answer_replay)
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert (number, rank) == (0, 0) and ts > 1e9
    assert events == [
        ["AllBlocksCleared"],
        ["BlockStored", [5, 6], None, [0, 1, 2, 3, 4, 5, 6, 7], 4, None, "GPU", None],
        ["BlockRemoved", [6], "GPU"],
    ]


def test_subscriber_gets_the_same_batches_as_a_replay(tmp_path: Path) -> None:
    with (
        publishing(tmp_path, topic="kv@pod@m") as publisher,
        connected(zmq.SUB, f"ipc://{tmp_path}/events") as socket,
    ):
        socket.subscribe(b"kv@")
        while not socket.poll(10):  # until the subscription has arrived
            publisher.publish(REMOVED)
        for _ in range(100):
            publisher.publish(REMOVED)
        received: Batches = []
        last = len(replay(tmp_path, 0, publisher.answer_replay)) - 1
        while not received or received[-1][0] < last:
            topic, number, payload = socket.recv_multipart()
            assert topic == b"kv@pod@m" and len(number) == 8
            received.append((int.from_bytes(number, "big"), payload))
        assert received == replay(tmp_path, received[0][0], publisher.answer_replay)


def test_slow_subscriber_loses_batches_and_delays_nothing(tmp_path: Path) -> None:
    with (
        publishing(tmp_path, hwm=1, buffer_steps=10) as publisher,
        connected(zmq.SUB, f"ipc://{tmp_path}/events") as socket,
    ):
        socket.subscribe(b"")
        while not socket.poll(10):
            publisher.publish(REMOVED)
        large = CacheEvents(False, b"", b"", [KVBlocksRemoved(list(range(10_000)))])
        for sent in count(1):
            publisher.publish(large)
            if sent == 5000:
                break
        kept = replay(tmp_path, 0, publisher.answer_replay)
        assert len(kept) == 10  # the latest ones
        last = kept[-1][0]
        numbers = []
        while socket.poll(100):
            numbers.append(int.from_bytes(socket.recv_multipart()[1], "big"))
        assert numbers == sorted(numbers) and len(numbers) < last


def test_malformed_request_for_a_replay_is_ignored(tmp_path: Path) -> None:
    with publishing(tmp_path) as publisher, connected(zmq.DEALER, f"ipc://{tmp_path}/replay") as socket:
        for frames in ([b"x"], [b"", b"short"], [b"", b"", bytes(8)]):
            socket.send_multipart(frames)
            while not publisher.answer_replay():
                pass
        assert not socket.poll(50)
        assert replay(tmp_path, 0, publisher.answer_replay) == []


def test_service_publishes_what_its_scheduler_reports(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    stored = KVBlocksStored([5], None, np.arange(16, dtype=np.int32).tobytes())
    with running_frontend(write_model(model), kv_events_config=config_of(tmp_path)) as front:
        assert front.rank.receive() == WATCH
        front.rank.step([], cache_events=CacheEvents(True, b"", b"", [stored]))
        batches: Batches = []
        while not batches:
            batches = replay(tmp_path, 0)
        assert Subscriber(batches).blocks == {5: (None, list(range(16)))}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "--kv-events-config: "),
        ("[]", "Expected `object`"),
        ('{"port": 1}', "unknown field `port`"),
        ('{"publisher": "kafka"}', "`publisher`"),
        ('{"buffer_steps": 0}', "`buffer_steps`"),
        ('{"hwm": "many"}', "`hwm`"),
        ('{"max_queue_size": -1}', "`max_queue_size`"),
        ('{"topic": 1}', "`topic`"),
        ('{"endpoint": "inproc://x"}', "endpoint must be"),
        ('{"replay_endpoint": "tcp://*"}', "replay_endpoint must be"),
    ],
)
def test_unusable_configuration_names_the_key(value: str, message: str) -> None:
    with pytest.raises(ConfigError, match="--kv-events-config") as caught:
        Config(kv_events_config=value)
    assert message in str(caught.value)


def test_events_need_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="enable_kv_cache_events needs the prefix cache"):
        Config(kv_events_config='{"enable_kv_cache_events": true}', disable_radix_cache=True)
    Config(kv_events_config='{"enable_kv_cache_events": true, "publisher": "null"}', disable_radix_cache=True)


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_address_in_use_names_the_key(tmp_path: Path, key: str) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        port = other.bind_to_random_port("tcp://*")
        with (
            pytest.raises(ConfigError, match=f" {key} .*Address already in use"),
            publishing(tmp_path, **{key: f"tcp://*:{port}"}),
        ):
            pass
