"""The queue of waiting requests, sorted by queue key.

The api process bounds its length (``--max-queued-requests``); ``ActiveRequests`` bounds its tokens
(``--max-queued-tokens``).
"""

from bisect import bisect_left, insort

from skiff_runtime.scheduler.request import QueueKey, Request


class RequestQueue:
    """A sorted queue from which any request can be removed."""

    def __init__(self) -> None:
        self._waiting: list[tuple[QueueKey, Request]] = []
        self.tokens = 0
        """Prompt tokens of all waiting requests."""
        self.uncached_tokens = 0
        """Of these, those that the prefix cache did not hold when their request entered the queue."""

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Insert a request by its key: a preempted one returns to its old position."""
        insort(self._waiting, (request.queue_key, request))
        self.tokens += request.prompt_tokens
        self.uncached_tokens += request.uncached_tokens

    def first(self, count: int) -> list[Request]:
        """Return the first ``count`` requests, or all of them if there are fewer."""
        return [request for _, request in self._waiting[:count]]

    def remove(self, request: Request) -> None:
        """Remove a request from any position."""
        index = bisect_left(self._waiting, request.queue_key, key=lambda each: each[0])
        assert self._waiting[index][1] is request
        del self._waiting[index]
        self.tokens -= request.prompt_tokens
        self.uncached_tokens -= request.uncached_tokens
