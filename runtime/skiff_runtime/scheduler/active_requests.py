"""The requests that have arrived and not ended: their acceptance, abort and end."""

from collections.abc import Iterable

from skiff_runtime import log
from skiff_runtime.config import Config
from skiff_runtime.errors import QueueFull, RequestError
from skiff_runtime.messages import AbortRequest, GenerateRequest, RequestFailed
from skiff_runtime.scheduler.adapters import Adapters
from skiff_runtime.scheduler.kv_cache_manager import KVCacheManager
from skiff_runtime.scheduler.request import (
    NO_SLOT,
    Request,
    RequestLimits,
    make_queue_key,
    make_request,
)
from skiff_runtime.scheduler.request_queue import RequestQueue
from skiff_runtime.scheduler.slots import Slots
from skiff_runtime.scheduler.token_batch_builder import TokenBatchBuilder


class ActiveRequests:
    """Gives every accepted request exactly one end: a row with a finish reason, or a ``RequestFailed``.

    An ended request keeps its slot and its pages until no step in flight has a row of it.
    """

    def __init__(
        self,
        config: Config,
        *,
        limits: RequestLimits,
        queue: RequestQueue,
        slots: Slots,
        kv_cache: KVCacheManager,
        replies: TokenBatchBuilder,
        adapters: Adapters,
    ) -> None:
        self._limits = limits
        self._max_queued_tokens = config.max_queued_tokens
        self._arrivals_per_level = config.running_limit + config.max_queued_requests
        """Arrivals that one priority level is worth: the maximum number of active requests, so that priority outweighs
        arrival order among all of them."""
        self._queue = queue
        self._slots = slots
        self._kv_cache = kv_cache
        self._replies = replies
        self._adapters = adapters
        self._by_uid: dict[int, Request] = {}
        self._arrivals = 0
        self._ended: list[Request] = []
        """Ended requests that still have a slot."""

    def accept(self, message: GenerateRequest) -> None:
        """Queue a request, or refuse it if it can never run or too many prompt tokens wait."""
        assert message.uid not in self._by_uid, f"uid {message.uid} is in use"
        self._arrivals += 1
        queue_key = make_queue_key(
            arrival=self._arrivals,
            priority=message.priority,
            arrivals_per_level=self._arrivals_per_level,
        )
        try:
            request = make_request(
                message,
                queue_key=queue_key,
                limits=self._limits,
                page_size=self._kv_cache.page_size,
                namespace=self._adapters.make_namespace(message),
            )
            self._check_queued_tokens(request)
        except RequestError as error:
            self._replies.add_failure(RequestFailed.of(message.uid, error))
            return
        request.uncached_tokens = self._kv_cache.estimate_uncached_tokens(request)
        self._by_uid[request.uid] = request
        self._adapters.enqueue(request)

    def _check_queued_tokens(self, request: Request) -> None:
        """Raise ``QueueFull`` if the waiting prompts are too long already. An empty queue takes any prompt."""
        waiting, prompt = self._queue.tokens, request.prompt_tokens
        if waiting and waiting + prompt > self._max_queued_tokens:
            raise QueueFull(
                f"{len(self._queue)} requests with {waiting} prompt tokens wait already, and this prompt has "
                f"{prompt}; at most {self._max_queued_tokens} may wait (--max-queued-tokens); retry shortly"
            )

    def abort(self, message: AbortRequest) -> None:
        """End a request in any state. An unknown one has ended already."""
        request = self._by_uid.get(message.uid)
        if request is None:
            log.debug("unknown_request_abort_ignored", uid=message.uid)
            return
        self._replies.add_end(request.uid, message.finish)
        if request.slot == NO_SLOT:
            self._adapters.withdraw(request)
        self._end(request)

    def fail_waiting(self, requests: Iterable[Request], error: RequestError) -> None:
        """End waiting requests with an error."""
        for request in requests:
            self._replies.add_failure(RequestFailed.of(request.uid, error))
            self._adapters.withdraw(request)
            self._end(request)

    def end_slots(self, slots: Iterable[int]) -> None:
        """End the requests in these slots, whose finish reasons have been reported."""
        for slot in slots:
            self._end(self._slots.request(int(slot)))

    def free_ended(self) -> None:
        """Free slots and pages of ended requests that no step in flight reads or writes."""
        if not self._ended:
            return
        in_flight = []
        for request in self._ended:
            if self._slots.num_in_flight_steps[request.slot]:
                in_flight.append(request)
            else:
                self._kv_cache.free(request)
                self._adapters.release(request)
        self._ended = in_flight

    def _end(self, request: Request) -> None:
        del self._by_uid[request.uid]
        if request.slot != NO_SLOT:
            self._slots.finish(request.slot)
            self._ended.append(request)
