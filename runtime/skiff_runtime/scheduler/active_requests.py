"""Every request that has arrived and not ended: how it comes in, and how it goes."""

from collections.abc import Iterable

from skiff_runtime import log
from skiff_runtime.config import Config
from skiff_runtime.errors import QueueFull, RequestError
from skiff_runtime.messages import AbortRequest, GenerateRequest, RequestFailed
from skiff_runtime.scheduler.kv_cache_manager import Tenancy
from skiff_runtime.scheduler.request import QUEUED, Limits, Request, accept, place_of
from skiff_runtime.scheduler.request_queue import RequestQueue
from skiff_runtime.scheduler.slots import Slots
from skiff_runtime.scheduler.token_batch_builder import Replies


class ActiveRequests:
    """Gives every known request exactly one end: a row that says why, or a ``RequestFailed``.

    The pages and the slot of an ended request stay its own until no step in flight has a
    row of it.
    """

    def __init__(
        self,
        config: Config,
        *,
        limits: Limits,
        queue: RequestQueue,
        slots: Slots,
        tenancy: Tenancy,
        replies: Replies,
    ) -> None:
        self._limits = limits
        self._max_queued_tokens = config.max_queued_tokens
        self._arrivals_per_level = config.running_limit + config.max_queued_requests
        """As many as may be here at a time, so that a level outweighs the order of all of them."""
        self._queue = queue
        self._slots = slots
        self._tenancy = tenancy
        self._replies = replies
        self._known: dict[int, Request] = {}
        self._arrivals = 0
        self._leaving: list[Request] = []
        """Ended requests that still have a slot."""

    def accept(self, message: GenerateRequest) -> None:
        """Queue a request, or refuse it for good."""
        assert message.uid not in self._known, f"uid {message.uid} is in use"
        self._arrivals += 1
        place = place_of(
            arrival=self._arrivals,
            priority=message.priority,
            arrivals_per_level=self._arrivals_per_level,
        )
        try:
            request = accept(message, place=place, limits=self._limits)
            self._check_room(request)
        except RequestError as error:
            self._replies.fail(RequestFailed.of(message.uid, error))
            return
        self._known[request.uid] = request
        self._queue.push(request)

    def _check_room(self, request: Request) -> None:
        """Refuse one more that would have to wait where too much waits already."""
        waiting, prompt = self._queue.tokens, request.prompt_tokens
        if waiting and waiting + prompt > self._max_queued_tokens:
            raise QueueFull(
                f"{len(self._queue)} requests with {waiting} prompt tokens wait already, and this prompt has "
                f"{prompt}; at most {self._max_queued_tokens} may wait (--max-queued-tokens); retry shortly"
            )

    def abort(self, message: AbortRequest) -> None:
        """End a request wherever it is; one that is not known has ended already."""
        request = self._known.get(message.uid)
        if request is None:
            log.debug("unknown_request_abort_ignored", uid=message.uid)
            return
        self._replies.end(request.uid, message.finish)
        if request.slot == QUEUED:
            self._queue.remove(request)
        self._end(request)

    def end_slots(self, slots: Iterable[int]) -> None:
        """End the requests in these slots; their last rows say so already."""
        for slot in slots:
            self._end(self._slots.request(int(slot)))

    def release(self) -> None:
        """Take back what ended requests held, once no step in flight reads or writes it."""
        if not self._leaving:
            return
        num_in_flight_steps = []
        for request in self._leaving:
            if self._slots.num_in_flight_steps[request.slot]:
                num_in_flight_steps.append(request)
            else:
                self._tenancy.leave(request)
        self._leaving = num_in_flight_steps

    def _end(self, request: Request) -> None:
        del self._known[request.uid]
        if request.slot != QUEUED:
            self._slots.end(request.slot)
            self._leaving.append(request)
