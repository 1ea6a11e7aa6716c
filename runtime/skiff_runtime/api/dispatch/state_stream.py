"""The streams of ``GET /events``: what routers know of this pod, sent when it changes.

Changes are gathered for ``MIN_INTERVAL_SECONDS`` and encoded once for all subscribers. A request that arrives with much
to compute is reported sooner, because routers that do not know of it yet would send others behind it. Without a
subscriber, a step costs a few additions, and the scheduler records nothing. A subscriber that reads too slowly is
disconnected; it comes back to a snapshot.
"""

import asyncio
import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from msgspec.structs import replace

from skiff_runtime import log
from skiff_runtime.api.dispatch.kv_event_publisher import KVEventPublisher
from skiff_runtime.api.dispatch.service_status import ServiceStatus
from skiff_runtime.api.dispatch.step_time import StepTimeModel
from skiff_runtime.api.http.asgi import AsgiWriter
from skiff_runtime.api.http.router_header import RouterRequest
from skiff_runtime.config import Config
from skiff_runtime.errors import Unavailable
from skiff_runtime.messages import CacheEvents, KVBlocksStored, StepStats, StreamOpened, TextBatch, WatchCache
from skiff_runtime.messages.transport import Sender
from skiff_runtime.prompt_blocks import DEFAULT_BYTES_PER_TOKEN, HASH_DTYPE, PROMPT_BLOCK_BYTES, PromptBlocks
from skiff_runtime.sse import encode_json
from skiff_runtime.state_events import (
    HEARTBEAT,
    HEARTBEAT_SECONDS,
    MIN_INTERVAL_SECONDS,
    URGENT_INTERVAL_SECONDS,
    URGENT_TOKENS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVBlocksChanged,
    LoadChanged,
    PodAdapters,
    PodLoad,
    PromptBlocksChanged,
    Snapshot,
    StateEvent,
)

MAX_SUBSCRIBERS: Final = 16
KEEP_WATCHING_SECONDS: Final = 60.0
"""Time for which the cache is watched on behalf of a subscriber that has left: a router that restarts finds its snapshot."""
_AVERAGE_WEIGHT: Final = 0.05

KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(eq=False, slots=True)
class Subscriber:
    """One stream. ``router_id``: the router that reads it, "" for another client. ``number``: the number of events sent."""

    writer: AsgiWriter
    prompt_blocks: bool
    kv_blocks: bool
    router_id: str = ""
    number: int = 0
    received: list[int] = field(default_factory=list)
    """Numbers of the router's requests that were accepted since its last event."""

    def send(self, data: bytes) -> None:
        """Send one event, whose data is ``data``."""
        self.writer.body(b"id: %d\ndata: %b\n\n" % (self.number, data), more=True)
        self.number += 1


class CacheMirror:
    """The content of rank 0's prefix cache as reported, for snapshots, and what has changed since the last ``take``."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.prompts: set[int] = set()
        self._blocks: dict[int, _Block] = {}
        self._prompt_changes: dict[int, bool] = {}
        self._kv_changes: list[KVEvent] = []

    def apply(self, events: CacheEvents) -> None:
        """Apply the changes of one step."""
        stored = np.frombuffer(events.prompts_stored, HASH_DTYPE).tolist()
        removed = np.frombuffer(events.prompts_removed, HASH_DTYPE).tolist()
        if events.is_snapshot:
            removed = sorted(self.prompts.difference(stored))
            self._blocks.clear()
            self._kv_changes = [AllBlocksCleared()]
        self.prompts.difference_update(removed)
        self.prompts.update(stored)
        self._prompt_changes.update(dict.fromkeys(removed, False))
        self._prompt_changes.update(dict.fromkeys(stored, True))
        for event in events.blocks:
            if isinstance(event, KVBlocksStored):
                self._store(event)
            else:
                for block in event.hashes:
                    self._blocks.pop(block, None)
                self._kv_changes.append(BlockRemoved(event.hashes))

    def _store(self, event: KVBlocksStored) -> None:
        parent = event.parent
        for name in event.hashes:
            self._blocks[name] = _Block(parent, event.adapter_id, event.adapter_name)
            parent = name
        self._kv_changes.append(self._make_stored(event.hashes))

    def take_prompts(self) -> PromptBlocksChanged | None:
        """Return the changes of prompt blocks."""
        if not self._prompt_changes:
            return None
        changes, self._prompt_changes = self._prompt_changes, {}
        return PromptBlocksChanged(
            stored=[block for block, stored in changes.items() if stored],
            removed=[block for block, stored in changes.items() if not stored],
        )

    def take_blocks(self) -> KVBlocksChanged | None:
        """Return the changes of KV blocks."""
        if not self._kv_changes:
            return None
        changes, self._kv_changes = self._kv_changes, []
        return KVBlocksChanged(time.time(), changes)

    def drop_changes(self) -> None:
        """Forget what has changed: a subscriber begins with a snapshot."""
        self._prompt_changes.clear()
        self._kv_changes.clear()

    def all_blocks(self) -> KVBlocksChanged:
        """Return all KV blocks, in as few events as their chains allow."""
        events: list[KVEvent] = [AllBlocksCleared()]
        run: list[int] = []
        for name, block in self._blocks.items():
            if run and block.parent == run[-1]:
                run.append(name)
                continue
            if run:
                events.append(self._make_stored(run))
            run = [name]
        if run:
            events.append(self._make_stored(run))
        return KVBlocksChanged(time.time(), events)

    def _make_stored(self, names: list[int]) -> BlockStored:
        """Return the event of consecutive blocks, which have one adapter."""
        first = self._blocks[names[0]]
        return BlockStored(
            names,
            first.parent,
            self._block_size,
            lora_id=first.adapter_id or None,
            lora_name=first.adapter_name or None,
        )


class _Block(NamedTuple):
    """A KV block: the one before it, and its adapter, 0 and "" for the base model."""

    parent: int | None
    adapter_id: int
    adapter_name: str


class _Arriving(NamedTuple):
    """An accepted request that the scheduler has not reported. ``tokens``, ``blocks``: those that are not cached."""

    tokens: int
    blocks: list[int]


class StateStream:
    """All subscribers, and what they are sent."""

    def __init__(
        self,
        config: Config,
        status: ServiceStatus,
        tokenizers: Sequence[Sender],
        *,
        in_flight: Callable[[], int],
        prompt_bytes: Callable[[int], int],
        publisher: KVEventPublisher | None = None,
        adapters: Callable[[Sequence[int]], PodAdapters] | None = None,
    ) -> None:
        """``in_flight``: returns the number of requests that are accepted and have not ended. ``prompt_bytes``: returns
        the length of the text of a request's prompt, by its uid, or 0. ``publisher``: gets all changes of KV blocks,
        with tokens. ``adapters``: returns the LoRA adapters, given the ids of those in a slot; None for a service
        without.
        """
        self._publisher = publisher
        self._config = config
        self._status = status
        self._to_scheduler = tokenizers[0]
        self._in_flight = in_flight
        self._find_prompt_bytes = prompt_bytes
        self._instance = uuid.uuid4().hex
        self._subscribers: dict[Subscriber, None] = {}
        self._mirror = CacheMirror(config.page_size)
        self._steps = StepTimeModel()
        self._stats = StepStats()
        self._sent = LoadChanged("", PodLoad())
        self._find_adapters = adapters
        self._sent_adapters: PodAdapters | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due_at = 0.0  # uvloop's handles have no ``when`` for delays below 0.5 ms
        self._flushed_at = 0.0
        self._watched = WatchCache(prompts=False, blocks=False)
        self._unwatch: asyncio.TimerHandle | None = None
        self._bytes_per_token = 0.0
        self._arriving: dict[int, _Arriving] = {}  # by uid
        self._arriving_tokens = 0
        self._arriving_blocks: set[int] = set()
        self._watch()

    @property
    def watches_prompts(self) -> bool:
        """Return whether prompts are to be hashed, because a router wants to know where they are cached."""
        return self._watched.prompts

    def subscribe(
        self, writer: AsgiWriter, *, prompt_blocks: bool, kv_blocks: bool, router_id: str = ""
    ) -> Subscriber:
        """Begin a stream, whose head was sent, with a snapshot. ``router_id``: its requests are acknowledged; "" for none.

        Raises:
            Unavailable: There are ``MAX_SUBSCRIBERS`` streams already.
        """
        self.check_has_room()
        subscriber = Subscriber(writer, prompt_blocks, kv_blocks, router_id)
        self.flush_now()  # the others get what has changed until now, which the snapshot includes
        self._subscribers[subscriber] = None
        self._watch()
        self._send_snapshot(subscriber)
        if self._timer is None:
            self._set_timer(HEARTBEAT_SECONDS)
        return subscriber

    def check_has_room(self) -> None:
        """Raise ``Unavailable`` if no further stream may begin."""
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise Unavailable(
                f"{MAX_SUBSCRIBERS} subscribers follow the events already", retry_after_seconds=1
            )

    def unsubscribe(self, subscriber: Subscriber) -> None:
        """End a stream."""
        self._subscribers.pop(subscriber, None)
        if self._unwatch is None:
            loop = asyncio.get_running_loop()
            self._unwatch = loop.call_later(KEEP_WATCHING_SECONDS, self._end_watch)

    def close(self) -> None:
        """End all streams: the server exits."""
        for subscriber in list(self._subscribers):
            subscriber.writer.body(b"", more=False)
        self._subscribers.clear()

    def record_accepted(self, uid: int, blocks: PromptBlocks | None, routed: RouterRequest | None) -> None:
        """Take a request into account that was accepted now, by its prompt's blocks. ``uid``: of its first choice.

        It counts as arriving until the scheduler reports that it has received it, or until ``record_ended``.
        ``blocks``: None where the prompt cannot be read.
        """
        if routed is not None:
            for subscriber in self._subscribers:
                if subscriber.router_id == routed.router_id:
                    subscriber.received.append(routed.number)
        tokens = 0 if blocks is None else self._count_arriving_tokens(uid, blocks)
        if self._subscribers:
            self.flush_soon(URGENT_INTERVAL_SECONDS if tokens >= URGENT_TOKENS else MIN_INTERVAL_SECONDS)

    def _count_arriving_tokens(self, uid: int, blocks: PromptBlocks) -> int:
        """Return the tokens of a prompt that are not cached, about, which count as arriving from now on."""
        names, cached, arriving = blocks.names(), self._mirror.prompts, self._arriving_blocks
        # A block is only cached with all those before it, and a request finds what another one before it computes.
        known = bisect_left(names, True, key=lambda name: name not in cached and name not in arriving)
        left_bytes = blocks.text_bytes - known * PROMPT_BLOCK_BYTES
        tokens = int(left_bytes / (self._bytes_per_token or DEFAULT_BYTES_PER_TOKEN))
        self._arriving[uid] = _Arriving(tokens, names[known:])
        self._arriving_tokens += tokens
        arriving.update(names[known:])
        return tokens

    def record_ended(self, uid: int) -> None:
        """Take the end of a request into account, which may have failed before the scheduler received it."""
        arrived = self._arriving.pop(uid, None)
        if arrived is not None:
            self._arriving_tokens -= arrived.tokens
            self._arriving_blocks.difference_update(arrived.blocks)

    def record_opened(self, opened: Sequence[StreamOpened]) -> None:
        """Learn how many tokens prompts have, from requests that run for the first time and have not ended."""
        for each in opened:
            text_bytes = self._find_prompt_bytes(each.uid)
            if text_bytes:
                weight = _AVERAGE_WEIGHT if self._bytes_per_token else 1.0
                self._bytes_per_token += weight * (text_bytes / each.prompt_tokens - self._bytes_per_token)

    def record_batch(self, batch: TextBatch) -> None:
        """Take the results of a step into account."""
        stats = self._stats = batch.stats
        for uid in stats.received:
            self.record_ended(uid)
        self._steps.record(stats)
        if batch.usages:
            finished = len(batch.usages)
            self._steps.record_finishes(finished, time.monotonic(), others_wait=stats.queued > 0)
        if batch.cache_events is not None:
            self._mirror.apply(batch.cache_events)
            if self._publisher is not None:
                self._publisher.publish(batch.cache_events)
        if self._subscribers:
            self.flush_soon()
        else:
            self._mirror.drop_changes()

    def flush_soon(self, interval: float = MIN_INTERVAL_SECONDS) -> None:
        """Send what has changed, at the latest ``interval`` seconds after the events before it."""
        loop = asyncio.get_running_loop()
        wait = self._flushed_at + interval - loop.time()
        if wait <= 0:
            self.flush_now()
        elif self._timer is not None and self._timer_due_at > loop.time() + wait:
            self._set_timer(wait)

    def _set_timer(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer_due_at = loop.time() + seconds
        self._timer = loop.call_later(seconds, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.flush_now()

    def flush_now(self) -> None:
        """Send what has changed at once, or a comment if nothing has."""
        prompts, blocks = self._mirror.take_prompts(), self._mirror.take_blocks()
        if not self._subscribers:
            return
        self._flushed_at = asyncio.get_running_loop().time()
        self._set_timer(HEARTBEAT_SECONDS)
        load, adapters = self._read_load(), self._read_adapters()
        has_changed = load != self._sent or adapters != self._sent_adapters
        changed = load if adapters == self._sent_adapters else replace(load, adapters=adapters)
        events: list[tuple[StateEvent | None, Callable[[Subscriber], bool]]] = [
            (changed if has_changed else None, lambda each: not each.received),
            (prompts, lambda each: each.prompt_blocks),
            (blocks, lambda each: each.kv_blocks),
        ]
        self._sent, self._sent_adapters = load, adapters
        encoded = [(encode_json(event), wants) for event, wants in events if event is not None]
        for subscriber in list(self._subscribers):
            wanted = [data for data, wants in encoded if wants(subscriber)]
            if subscriber.received:
                wanted.insert(0, encode_json(replace(changed, received=subscriber.received)))
                subscriber.received = []
            for data in wanted:
                subscriber.send(data)
            if not wanted:
                subscriber.writer.body(HEARTBEAT, more=True)

    def _read_adapters(self) -> PodAdapters | None:
        return None if self._find_adapters is None else self._find_adapters(self._stats.resident_adapters)

    def _read_load(self) -> LoadChanged:
        stats, steps, config = self._stats, self._steps, self._config
        used = stats.pages_total - stats.pages_free - stats.pages_cached
        requests = self._in_flight()
        return LoadChanged(
            self._status.state,
            PodLoad(
                requests=requests,
                max_requests=config.running_limit + config.max_queued_requests,
                waiting=stats.queued,
                running=stats.running,
                max_running=config.running_limit,
                queued_tokens=stats.queued_uncached_tokens,
                prefill_tokens=stats.prefill_tokens_left,
                kv_cache_usage=round(used / stats.pages_total, 4) if stats.pages_total else 0.0,
                step_seconds=round(steps.step_seconds, 6),
                prefill_token_seconds=round(steps.prefill_token_seconds, 9),
                max_step_tokens=config.max_num_batched_tokens,
                finish_seconds=round(steps.finish_seconds, 4),
                bytes_per_token=round(self._bytes_per_token, 3),
                arriving_tokens=self._arriving_tokens,
            ),
        )

    def _send_snapshot(self, subscriber: Subscriber) -> None:
        load = self._sent = self._read_load()
        adapters = self._sent_adapters = self._read_adapters()
        prompts = sorted(self._mirror.prompts) if subscriber.prompt_blocks else []
        data = encode_json(
            Snapshot(
                instance=self._instance,
                model=self._config.served_model_name or "",
                state=load.state,
                block_size=self._config.page_size,
                kv_tokens=self._status.kv_tokens,
                isolates_keys=self._config.isolate_keys,
                load=load.load,
                prompt_blocks=prompts,
                adapters=adapters,
                acknowledges=bool(subscriber.router_id),
            )
        )
        blocks = encode_json(self._mirror.all_blocks()) if subscriber.kv_blocks else b""
        subscriber.writer.raise_backlog_limit(len(data) + len(blocks))
        subscriber.send(data)
        if blocks:
            subscriber.send(blocks)

    def _watch(self) -> None:
        """Have the scheduler record what the subscribers want to know, beside what it records already."""
        if self._unwatch is not None:
            self._unwatch.cancel()
            self._unwatch = None
        wanted = self._find_wanted()
        self._set_watched(
            WatchCache(
                prompts=self._watched.prompts or wanted.prompts,
                blocks=self._watched.blocks or wanted.blocks,
                tokens=wanted.tokens,
            )
        )

    def _end_watch(self) -> None:
        """Stop recording what no subscriber wants to know."""
        self._unwatch = None
        self._set_watched(self._find_wanted())

    def _find_wanted(self) -> WatchCache:
        """Return what the present subscribers and the publisher want to know of the cache."""
        publishes = self._publisher is not None
        return WatchCache(
            prompts=any(each.prompt_blocks for each in self._subscribers),
            blocks=publishes or any(each.kv_blocks for each in self._subscribers),
            tokens=publishes,
        )

    def _set_watched(self, watched: WatchCache) -> None:
        if watched == self._watched:
            return
        log.event("cache_watched", prompt_blocks=watched.prompts, kv_blocks=watched.blocks)
        self._watched = watched
        self._to_scheduler.send(watched)
        if not (watched.prompts or watched.blocks):
            self._mirror = CacheMirror(self._config.page_size)
