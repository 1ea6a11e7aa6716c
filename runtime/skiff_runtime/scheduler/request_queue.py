"""The queue of waiting requests, sorted by queue key.

The api process bounds its length (``--max-queued-requests``); ``ActiveRequests`` bounds its tokens
(``--max-queued-tokens``).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from skiff_runtime.scheduler.request import QueueKey, Request


class RequestQueue:
    """A sorted queue from which any request can be removed.

    A request that waits for its LoRA adapter is held back: it counts as waiting, but is not in the order of admission.
    """

    def __init__(self) -> None:
        self._ready = _SortedRequests()
        self._held_back = _SortedRequests()
        self._adapters = Counter[int]()
        self.tokens = 0
        """Prompt tokens of all waiting requests."""
        self.uncached_tokens = 0
        """Of these, those that the prefix cache did not hold when their request entered the queue."""

    def __len__(self) -> int:
        return len(self._ready) + len(self._held_back)

    @property
    def num_ready(self) -> int:
        """Waiting requests that are not held back."""
        return len(self._ready)

    @property
    def held_back(self) -> Sequence[Request]:
        """The requests that are held back, in the order of the queue."""
        return self._held_back.requests

    def push(self, request: Request) -> None:
        """Insert a request by its key: a preempted one returns to its old position."""
        self._ready.add(request)
        self.tokens += request.prompt_tokens
        self.uncached_tokens += request.uncached_tokens
        if request.adapter_id:
            self._adapters[request.adapter_id] += 1

    def first(self, count: int) -> list[Request]:
        """Return the first ``count`` requests that are not held back, or all of them if there are fewer."""
        return self._ready.requests[:count]

    def remove(self, request: Request) -> None:
        """Remove a request from any position."""
        (self._held_back if request in self._held_back else self._ready).remove(request)
        self.tokens -= request.prompt_tokens
        self.uncached_tokens -= request.uncached_tokens
        if request.adapter_id:
            self._adapters[request.adapter_id] -= 1
            if not self._adapters[request.adapter_id]:
                del self._adapters[request.adapter_id]

    def hold_back(self, request: Request) -> None:
        """Take a request out of the order of admission."""
        self._ready.remove(request)
        self._held_back.add(request)

    def release(self, request: Request) -> None:
        """Put a request that was held back into the order of admission again, at its old position."""
        self._held_back.remove(request)
        self._ready.add(request)

    def is_held_back(self, request: Request) -> bool:
        """Return whether a request is in the queue and held back."""
        return request in self._held_back

    def wants(self, adapter_id: int) -> bool:
        """Return whether a waiting request needs an adapter."""
        return adapter_id in self._adapters

    def adapters(self) -> list[int]:
        """Return the adapters of waiting requests, in ascending order of ids."""
        return sorted(self._adapters)

    def adapters_before(self, queue_key: QueueKey) -> set[int]:
        """Return the adapters of the waiting requests that are ahead of ``queue_key``."""
        return {
            request.adapter_id
            for requests in (self._ready, self._held_back)
            for request in requests.before(queue_key)
        }


class _SortedRequests:
    """Requests in the order of their queue keys."""

    def __init__(self) -> None:
        self._keys: list[QueueKey] = []
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, request: Request) -> bool:
        index = bisect_left(self._keys, request.queue_key)
        return index < len(self._keys) and self.requests[index] is request

    def add(self, request: Request) -> None:
        index = bisect_left(self._keys, request.queue_key)
        self._keys.insert(index, request.queue_key)
        self.requests.insert(index, request)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._keys, request.queue_key)
        assert self.requests[index] is request
        del self._keys[index], self.requests[index]

    def before(self, queue_key: QueueKey) -> list[Request]:
        """Return the requests with a lower key."""
        return self.requests[: bisect_left(self._keys, queue_key)]
