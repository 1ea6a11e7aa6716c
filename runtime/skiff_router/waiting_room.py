"""The waiting room: requests for a model without a ready pod wait here until it has one, in the order of their arrival.

A model has no ready pod while it is scaled to zero, or while its pods start, crash or are replaced. At zero, the first
request scales it up. The number of requests, their bytes and their waiting time are bounded over all models. A draining
router rejects waiting requests with a 503, so that another replica serves them.

The queue of a model is polled every ``POLL_SECONDS``: a pod becomes available by changes in several places (an
EndpointSlice, a probe), and a poll costs a microsecond.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from skiff_router.endpoints import Backend
from skiff_router.kubernetes_watch import ApiError
from skiff_router.metrics import RouterMetrics
from skiff_router.scale_requests import CONFLICT, ScaleRequester
from skiff_router.scaling import Scaling
from skiff_router.startup_progress import WAITING, read_progress
from skiff_router.upstream import UpstreamError
from skiff_runtime import log
from skiff_runtime.errors import QueueFull, Unavailable

POLL_SECONDS: Final = 0.02
PROGRESS_SECONDS: Final = 1.0
KEEP_ALIVE_SECONDS: Final = 10.0
"""A stream gets a comment at least this often, so that nothing between takes its connection for dead."""
SCALE_INTERVAL_SECONDS: Final = 1.0
"""Interval in which the number of pods may be raised again."""
CONFLICT_SECONDS: Final = 0.05
"""The watch shows the version that has changed within milliseconds."""
REFUSED_SECONDS: Final = 5.0
DEFAULT_START_SECONDS: Final = 30.0
MAX_RETRY_SECONDS: Final = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingLimits:
    """Limits on all requests that wait at the same time: their number, the bytes of their bodies, and the time of each."""

    requests: int
    body_bytes: int
    seconds: float


@dataclass(eq=False, slots=True, kw_only=True)
class WaitingRequest:
    """One request that waits, maybe more than once; its time limit counts from the first time.

    ``body_bytes``: size of its body. ``on_progress``: called with the start's progress in words, if it changed or for long.
    """

    body_bytes: int
    on_progress: Callable[[str], None]
    arrived_at: float = 0.0
    deadline: float = 0.0
    reported: str = ""
    reported_at: float = 0.0
    released: asyncio.Future[None] | None = None


@dataclass(eq=False, slots=True)
class _Queue:
    """The requests that wait for one model, and the state of the search for its pod.

    ``began_at``: arrival of the first one. ``has_first_pod``: a request for a first pod was accepted since.
    """

    began_at: float
    has_first_pod: bool = False
    requests: dict[WaitingRequest, None] = field(default_factory=dict)
    progress: str = WAITING
    progress_at: float = 0.0
    next_request_at: float = 0.0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    reading: bool = False
    is_requesting: bool = False

    def begin(self, task: asyncio.Task[None]) -> None:
        """Keep a task until its end."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)


class WaitingRoom:
    """Holds the requests of all models without a ready pod."""

    def __init__(
        self, limits: WaitingLimits, metrics: RouterMetrics, requester: ScaleRequester | None = None
    ) -> None:
        """``requester``: requests pods; without one, the room only waits."""
        self._limits = limits
        self._metrics = metrics
        self._requester = requester
        self._queues: dict[Backend, _Queue] = {}
        self._requests = 0
        self._body_bytes = 0
        self._is_closed = False

    def must_wait(self, backend: Backend) -> bool:
        """Return whether a new request has to wait: no pod is available but expected, or others wait that came before."""
        return self.is_expected(backend) and (backend in self._queues or not backend.available())

    def is_expected(self, backend: Backend) -> bool:
        """Return whether a model without a ready pod will have one, so that requests may wait for it."""
        return backend.scaling is not None and backend.scaling.is_expected and self._limits.requests > 0

    async def wait(self, backend: Backend, request: WaitingRequest) -> None:
        """Return when a pod is available to the request.

        Raises:
            QueueFull: Too many requests wait already.
            Unavailable: No pod became ready in time, none is expected any more, or the router shuts down.
        """
        now = asyncio.get_running_loop().time()
        if self._is_closed:
            raise _closed()
        queue = self._queues.get(backend)
        if (
            self._requests >= self._limits.requests
            or self._body_bytes + request.body_bytes > self._limits.body_bytes
        ):
            self._metrics.record_wait(backend.model, "rejected")
            raise QueueFull(
                f"no pod of the model {backend.model!r} is ready, and {self._requests} requests wait already; retry",
                retry_after_seconds=_retry_after(backend.scaling, queue, now),
            )
        if not request.deadline:
            request.arrived_at = request.reported_at = now
            request.deadline = now + self._limits.seconds
        if queue is None:
            queue = self._queues[backend] = _Queue(now)
            queue.begin(asyncio.get_running_loop().create_task(self._serve_queue(backend, queue)))
        await self._hold(backend, queue, request)

    def close(self) -> None:
        """Reject all waiting requests, and accept no more: the router shuts down."""
        self._is_closed = True
        for queue in list(self._queues.values()):
            for request in list(queue.requests):
                _end(request, _closed())

    async def _hold(self, backend: Backend, queue: _Queue, request: WaitingRequest) -> None:
        """Hold one request until it is released, or its time is over."""
        request.released = asyncio.get_running_loop().create_future()
        queue.requests[request] = None
        self._count(backend, request, 1)
        outcome = "disconnected"
        try:
            async with asyncio.timeout_at(request.deadline):
                await request.released
            outcome = "released"
        except TimeoutError:
            outcome = "timeout"
            now = asyncio.get_running_loop().time()
            raise Unavailable(
                f"no pod of the model {backend.model!r} was ready within {self._limits.seconds:g} s ({queue.progress}); "
                "retry",
                retry_after_seconds=_retry_after(backend.scaling, queue, now),
            ) from None
        except Unavailable:
            outcome = "unavailable"
            raise
        finally:
            del queue.requests[request]
            self._count(backend, request, -1)
            self._metrics.record_wait(backend.model, outcome)

    def _count(self, backend: Backend, request: WaitingRequest, change: int) -> None:
        self._requests += change
        self._body_bytes += change * request.body_bytes
        self._metrics.record_waiting(backend.model, change)

    async def _serve_queue(self, backend: Backend, queue: _Queue) -> None:
        """Serve the queue of one model until no request waits."""
        loop = asyncio.get_running_loop()
        log.event("requests_wait", model=backend.model)
        try:
            while queue.requests and not self._release(backend, queue):
                self._poll(backend, queue, loop.time())
                await asyncio.sleep(POLL_SECONDS)
        finally:
            del self._queues[backend]
            for request in queue.requests:  # none but after an error
                _end(request, Unavailable("the router could not look for a pod; retry"))
        log.event("requests_waited", model=backend.model, seconds=loop.time() - queue.began_at)

    def _release(self, backend: Backend, queue: _Queue) -> bool:
        """Release all requests if a pod is available, or none is expected; return whether they are.

        Those that arrive from now on go to the pod directly, behind the released ones: these run first.
        """
        if backend.available():
            for request in sorted(queue.requests, key=lambda each: each.arrived_at):
                _end(request)
            return True
        if not self.is_expected(backend):
            for request in queue.requests:
                _end(request, Unavailable(f"the model {backend.model!r} was stopped; no pod is expected"))
            return True
        return False

    def _poll(self, backend: Backend, queue: _Queue, now: float) -> None:
        """Request pods, and report the progress of the start."""
        self._request_pods(backend, queue, now)
        if now >= queue.progress_at and not queue.reading:
            queue.reading = True
            queue.begin(asyncio.get_running_loop().create_task(self._read_progress(backend, queue)))
        for request in queue.requests:
            changed = queue.progress != request.reported and now - request.reported_at >= PROGRESS_SECONDS
            if changed or now - request.reported_at >= KEEP_ALIVE_SECONDS:
                request.reported, request.reported_at = queue.progress, now
                request.on_progress(queue.progress)

    def _request_pods(self, backend: Backend, queue: _Queue, now: float) -> None:
        """Request as many pods as the waiting requests need, if fewer are desired."""
        scaling = backend.scaling
        if self._requester is None or scaling is None or not scaling.is_autoscaled:
            return
        if queue.is_requesting or now < queue.next_request_at:
            return
        needed = scaling.needed(len(queue.requests), sum(each.body_bytes for each in queue.requests))
        if needed > scaling.replicas:
            queue.is_requesting = True
            task = self._send_scale_request(self._requester, backend, scaling, queue, needed)
            queue.begin(asyncio.get_running_loop().create_task(task))

    async def _send_scale_request(
        self, requester: ScaleRequester, backend: Backend, scaling: Scaling, queue: _Queue, replicas: int
    ) -> None:
        """Send a request for pods that was decided on by ``scaling``, which the watch may have replaced meanwhile."""
        result, pause = "accepted", SCALE_INTERVAL_SECONDS
        is_first = not scaling.replicas and not queue.has_first_pod
        try:
            await requester.request(backend, scaling, replicas)
            if is_first:
                queue.has_first_pod = True
                seconds = asyncio.get_running_loop().time() - queue.began_at
                self._metrics.record_first_pod_request(backend.model, seconds)
            log.event("pods_requested", model=backend.model, service=backend.key, replicas=replicas)
        except (ApiError, UpstreamError, TimeoutError, OSError) as error:
            conflicts = isinstance(error, ApiError) and error.status == CONFLICT
            result, pause = ("conflict", CONFLICT_SECONDS) if conflicts else ("failed", REFUSED_SECONDS)
            if not conflicts:
                log.warning("pods_not_requested", service=backend.key, reason=error, retry_seconds=pause)
        self._metrics.record_scale_request(backend.model, result)
        queue.next_request_at = asyncio.get_running_loop().time() + pause
        queue.is_requesting = False

    async def _read_progress(self, backend: Backend, queue: _Queue) -> None:
        queue.progress = await read_progress(backend)
        queue.progress_at = asyncio.get_running_loop().time() + PROGRESS_SECONDS
        queue.reading = False


def _end(request: WaitingRequest, error: Unavailable | None = None) -> None:
    """End the wait of a request, with an error or a pod."""
    assert request.released is not None, "it waits"
    if request.released.done():
        return
    if error is None:
        request.released.set_result(None)
    else:
        request.released.set_exception(error)


def _closed() -> Unavailable:
    return Unavailable("the router shuts down; retry, another replica may answer", retry_after_seconds=1)


def _retry_after(scaling: Scaling | None, queue: _Queue | None, now: float) -> int:
    """Return the seconds after which a pod may be ready: what is left of the time that the last start took."""
    start = (scaling.start_seconds if scaling is not None else 0.0) or DEFAULT_START_SECONDS
    passed = now - queue.began_at if queue is not None else 0.0
    return int(min(MAX_RETRY_SECONDS, max(1.0, start - passed)))
