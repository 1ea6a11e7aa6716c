"""Every request that has arrived and not ended: how it comes in, and how it goes."""

from collections.abc import Iterable

from skiff_runtime import log
from skiff_runtime.errors import RequestError
from skiff_runtime.messages import AbortRequest, GenerateRequest, RequestFailed
from skiff_runtime.scheduler.queue import RequestQueue
from skiff_runtime.scheduler.replies import Replies
from skiff_runtime.scheduler.request import QUEUED, Limits, Request, accept
from skiff_runtime.scheduler.slots import Slots
from skiff_runtime.scheduler.tenancy import Tenancy


class Registry:
    """Gives every known request exactly one end: a row that says why, or a ``RequestFailed``.

    The pages and the slot of an ended request stay its own until no step in flight has a
    row of it.
    """

    def __init__(
        self, *, limits: Limits, queue: RequestQueue, slots: Slots, tenancy: Tenancy, replies: Replies
    ) -> None:
        self._limits = limits
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
        try:
            request = accept(message, arrival=self._arrivals, limits=self._limits)
        except RequestError as error:
            self._replies.fail(RequestFailed.of(message.uid, error))
            return
        self._known[request.uid] = request
        self._queue.push(request)

    def abort(self, message: AbortRequest) -> None:
        """End a request wherever it is; one that is not known has ended already."""
        request = self._known.get(message.uid)
        if request is None:
            log.debug("abort_of_unknown", uid=message.uid)
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
        flying = []
        for request in self._leaving:
            if self._slots.flying[request.slot]:
                flying.append(request)
            else:
                self._tenancy.leave(request)
        self._leaving = flying

    def _end(self, request: Request) -> None:
        del self._known[request.uid]
        if request.slot != QUEUED:
            self._slots.end(request.slot)
            self._leaving.append(request)
