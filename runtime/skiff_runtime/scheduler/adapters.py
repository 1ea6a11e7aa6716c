"""LoRA adapters as the scheduler sees them: which are loaded, in host memory, and in LoRA slots.

The problem: adapters are many, the slots of GPU memory few, and host memory is bounded, too. A request whose adapter has no
slot must wait without delaying other requests. Every rank must decide the same.

The idea: the queue holds such a request back, outside of the order of admission, until its adapter is resident or can become
so: in host memory, with a slot that no running request uses. Reads into host memory are started here, and rank 0 reports
their end as a message to every rank, so all ranks know of it in the same turn. Where host memory is full, a read replaces the
adapter that was used least recently, except those of running requests and of requests further ahead in the queue.

The bound: once ``max_overtaken`` requests with adapters from behind it have started before a request that is held back, no
further one does until it has started. Slots are then freed as running requests end, so no request waits for ever. Requests of
the base model need no slot and never wait here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from skiff_runtime.errors import ModelNotFound
from skiff_runtime.kvcache.namespace import CacheNamespace
from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.messages import (
    AdapterLoaded,
    AdapterRead,
    AdapterRefused,
    GenerateRequest,
    LoadAdapter,
    UnloadAdapter,
)
from skiff_runtime.scheduler.adapter_store import AdapterStore
from skiff_runtime.scheduler.lora_slots import LoraSlots
from skiff_runtime.scheduler.request import NO_REQUEST_BEFORE, QueueKey, Request
from skiff_runtime.scheduler.request_queue import RequestQueue
from skiff_runtime.scheduler.token_batch_builder import TokenBatchBuilder
from skiff_runtime.step import NO_LORA_SLOT, LoraLoad

FIRST_READ: Final = NO_REQUEST_BEFORE
"""Queue key of the first read of a new adapter, ahead of all requests."""


class HostCopy(Enum):
    """The state of an adapter in host memory."""

    ABSENT = auto()
    READING = auto()
    PRESENT = auto()


@dataclass(slots=True, eq=False)
class Adapter:
    """A loaded adapter. ``load_uid``: the call that waits for its first read."""

    adapter_id: int
    name: str
    path: str
    load_uid: int | None = None
    copy: HostCopy = HostCopy.ABSENT
    last_used: int = 0
    """Logical time of the last use of the host copy."""
    is_leaving: bool = False
    """It is unloaded, and goes once its read and its requests have ended."""


class Adapters:
    """The table of adapters of one scheduler, and the requests that wait for them."""

    def __init__(
        self,
        *,
        slots: LoraSlots,
        host_limit: int,
        max_overtaken: int,
        queue: RequestQueue,
        pool: PagePool,
        replies: TokenBatchBuilder,
        store: AdapterStore | None,
    ) -> None:
        """``host_limit``: most adapters in host memory. ``store``: None if the service has no adapters."""
        self._slots = slots
        self._host_limit = host_limit
        self._max_overtaken = max_overtaken
        self._queue = queue
        self._pool = pool
        self._replies = replies
        self._store = store
        self._adapters: dict[int, Adapter] = {}
        self._num_copies = 0
        """Adapters in host memory or on their way there."""
        self._uses = 0
        self.has_changed = False
        """Something has happened since ``advance`` that may let a request or a read proceed."""
        self._due: Request | None = None
        self._due_is_stale = False
        self.num_reads = 0
        """Reads into host memory that have succeeded since the start."""

    def preload(self, adapters: Sequence[LoadAdapter], errors: Mapping[int, str]) -> None:
        """Add the adapters of ``--lora``, which the store has read: it holds as many of them as fit into host memory.

        Those with ``errors`` are refused.
        """
        for each in adapters:
            if each.adapter_id in errors:
                reply = AdapterRefused(each.uid, each.adapter_id, errors[each.adapter_id])
                self._replies.add_adapter(reply)
                continue
            adapter = Adapter(each.adapter_id, each.name, each.path)
            if self._num_copies < self._host_limit:
                adapter.copy = HostCopy.PRESENT
                self._num_copies += 1
            self._adapters[each.adapter_id] = adapter

    def load(self, message: LoadAdapter) -> None:
        """Add an adapter, which the sender may choose once it has been read."""
        assert message.adapter_id not in self._adapters
        self._adapters[message.adapter_id] = Adapter(
            message.adapter_id, message.name, message.path, load_uid=message.uid
        )
        self.has_changed = True

    def unload(self, message: UnloadAdapter) -> None:
        """Refuse further requests of an adapter, and forget it once those that are active have ended.

        One whose load was refused is forgotten already.
        """
        adapter = self._adapters.get(message.adapter_id)
        if adapter is not None:
            adapter.is_leaving = self.has_changed = True

    def finish_read(self, message: AdapterRead) -> list[Request]:
        """Note that a read has ended; return the waiting requests that cannot be served because it has failed."""
        adapter = self._adapters[message.adapter_id]
        assert adapter.copy is HostCopy.READING
        self.has_changed = self._due_is_stale = True
        if not message.error:
            adapter.copy = HostCopy.PRESENT
            self.num_reads += 1
            self._use(adapter)
            if adapter.load_uid is not None:
                self._replies.add_adapter(AdapterLoaded(adapter.load_uid, adapter.adapter_id))
                adapter.load_uid = None
            return []
        adapter.copy = HostCopy.ABSENT
        self._num_copies -= 1
        if adapter.load_uid is not None:
            del self._adapters[adapter.adapter_id]
            self._replies.add_adapter(AdapterRefused(adapter.load_uid, adapter.adapter_id, message.error))
        return [each for each in self._queue.held_back if each.adapter_id == adapter.adapter_id]

    def make_namespace(self, message: GenerateRequest) -> CacheNamespace:
        """Return the namespace of the prefix cache for a request. Raises ``ModelNotFound`` if its adapter is not loaded."""
        if not message.adapter_id:
            return CacheNamespace(message.cache_salt)
        adapter = self._adapters.get(message.adapter_id)
        if adapter is None or adapter.is_leaving:
            raise ModelNotFound("the adapter has been unloaded", param="model")
        return CacheNamespace(message.cache_salt, adapter.adapter_id, adapter.name)

    def enqueue(self, request: Request) -> None:
        """Put a request into the queue, held back if its adapter cannot be used now."""
        self._queue.push(request)
        if not self.can_start(request):
            self.hold_back(request)

    def can_start(self, request: Request) -> bool:
        """Return whether a waiting request may start: its adapter has a slot, or can have one, and no request is due before it."""
        if not request.adapter_id:
            return True
        due = self._find_due()
        if due is not None and due.queue_key < request.queue_key:
            return False
        return self._slots.is_resident(request.adapter_id) or self._can_load(request.adapter_id)

    def hold_back(self, request: Request) -> None:
        """Take a request out of the order of admission until it can start."""
        self._queue.hold_back(request)
        self._due_is_stale |= self._is_due(request)
        self.has_changed = True

    def withdraw(self, request: Request) -> None:
        """Remove a request from the queue that ends before it starts: others may have waited for it to start first."""
        self._queue.remove(request)
        self.has_changed = True

    def acquire(self, request: Request) -> LoraLoad | None:
        """Give a request that starts the slot of its adapter; return the load of the adapter if the slot needs one."""
        if not request.adapter_id:
            return None
        request.lora_slot, load = self._slots.acquire(request.adapter_id)
        self._use(self._adapters[request.adapter_id])
        for each in self._queue.held_back:
            if each.queue_key > request.queue_key:
                break
            each.times_overtaken += 1
            self._due_is_stale |= self._is_due(each)
        self.has_changed = True
        return load

    def release(self, request: Request) -> None:
        """Take the slot of its adapter from a request that no step in flight computes."""
        if request.lora_slot != NO_LORA_SLOT:
            slot, request.lora_slot = request.lora_slot, NO_LORA_SLOT
            self.has_changed |= self._slots.release(slot)

    def advance(self) -> None:
        """Complete unloads, start reads, and let requests back into the order of admission that can start."""
        if not self.has_changed:
            return
        self.has_changed = False
        for adapter in [each for each in self._adapters.values() if each.is_leaving]:
            self._try_remove(adapter)
        self._start_reads()
        self._release_startable()

    def check(self, requests: Sequence[Request]) -> None:
        """Assert that the counts agree with the running ``requests`` and with each other."""
        self._slots.check([each.lora_slot for each in requests if each.lora_slot != NO_LORA_SLOT])
        copies = [each for each in self._adapters.values() if each.copy is not HostCopy.ABSENT]
        assert len(copies) == self._num_copies <= self._host_limit
        assert set(self._slots.resident_adapters()) <= self._adapters.keys()
        assert all((each.lora_slot == NO_LORA_SLOT) == (each.adapter_id == 0) for each in requests)

    def _is_due(self, request: Request) -> bool:
        """Return whether no other request of an adapter may overtake a request that is held back.

        While its adapter is read they may: those that run, which they would wait for, do not delay the read.
        """
        adapter = self._adapters.get(request.adapter_id)
        is_reading = adapter is not None and adapter.copy is HostCopy.READING
        return request.times_overtaken >= self._max_overtaken and not is_reading

    def _find_due(self) -> Request | None:
        """Return the first request that is held back and may not be overtaken any more."""
        due = self._due
        if self._due_is_stale or (due is not None and not self._queue.is_held_back(due)):
            self._due = next(filter(self._is_due, self._queue.held_back), None)
            self._due_is_stale = False
        return self._due

    def _can_load(self, adapter_id: int) -> bool:
        return self._adapters[adapter_id].copy is HostCopy.PRESENT and self._slots.num_unused > 0

    def _use(self, adapter: Adapter) -> None:
        self._uses += 1
        adapter.last_used = self._uses

    def _try_remove(self, adapter: Adapter) -> None:
        adapter_id = adapter.adapter_id
        if (
            adapter.copy is HostCopy.READING
            or self._slots.is_used(adapter_id)
            or self._queue.wants(adapter_id)
        ):
            return
        self._slots.vacate(adapter_id)
        self._pool.discard(CacheNamespace.adapter_prefix(adapter_id))  # no later request can match them
        self._drop_copy(adapter)
        del self._adapters[adapter_id]

    def _drop_copy(self, adapter: Adapter) -> None:
        if adapter.copy is HostCopy.PRESENT:
            assert self._store is not None
            adapter.copy = HostCopy.ABSENT
            self._num_copies -= 1
            self._store.drop(adapter.adapter_id)

    def _start_reads(self) -> None:
        """Start the reads that are needed, as far as host memory has room: of new adapters, then in the queue's order."""
        for adapter in list(self._adapters.values()):
            if adapter.load_uid is not None:
                self._try_read(adapter, FIRST_READ)
        for request in self._queue.held_back:
            if not self._slots.is_resident(request.adapter_id):
                self._try_read(self._adapters[request.adapter_id], request.queue_key)

    def _try_read(self, adapter: Adapter, queue_key: QueueKey) -> None:
        """Start to read an adapter that is not in host memory, if another one can make room for it."""
        if adapter.copy is not HostCopy.ABSENT:
            return
        assert self._store is not None
        if self._num_copies == self._host_limit:
            replaced = self._find_replaceable_copy(queue_key)
            if replaced is None:
                return
            self._drop_copy(replaced)
        adapter.copy = HostCopy.READING
        self._due_is_stale = True
        self._num_copies += 1
        self._store.begin_read(adapter.adapter_id, adapter.path)

    def _find_replaceable_copy(self, queue_key: QueueKey) -> Adapter | None:
        """Return the least recently used host copy that neither a running request nor one before ``queue_key`` needs."""
        needed = self._queue.adapters_before(queue_key)
        candidates = [
            each
            for each in self._adapters.values()
            if each.copy is HostCopy.PRESENT
            and each.adapter_id not in needed
            and not self._slots.is_used(each.adapter_id)
        ]
        return min(candidates, key=lambda each: each.last_used, default=None)

    def _release_startable(self) -> None:
        """Release requests in the queue's order, no more adapters without a slot than slots are unused."""
        unused, claimed = self._slots.num_unused, set[int]()
        for request in list(self._queue.held_back):
            adapter_id = request.adapter_id
            if not (self._slots.is_used(adapter_id) or adapter_id in claimed):
                is_ready = self._slots.is_resident(adapter_id) or self._can_load(adapter_id)
                if not is_ready or len(claimed) == unused:
                    if self._is_due(request):
                        return
                    continue
                claimed.add(adapter_id)
            self._queue.release(request)
