"""Requests that wait to run, in the order of their places.

Its length is bounded by the front, which refuses what exceeds ``--max-queued-requests``, and its
tokens by the registry (``--max-queued-tokens``).
"""

from bisect import bisect_left, insort

from skiff_runtime.scheduler.request import Place, Request


class RequestQueue:
    """A sorted queue from which any request can leave at once."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Place, Request]] = []
        self.tokens = 0
        """Of the prompts of all who wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Join; after a preemption, where it stood before."""
        insort(self._waiting, (request.place, request))
        self.tokens += request.prompt_tokens

    def foremost(self, count: int) -> list[Request]:
        """The first ``count`` requests, or all of them."""
        return [request for _, request in self._waiting[:count]]

    def remove(self, request: Request) -> None:
        """Leave, from wherever it stands."""
        index = bisect_left(self._waiting, request.place, key=lambda each: each[0])
        assert self._waiting[index][1] is request
        del self._waiting[index]
        self.tokens -= request.prompt_tokens
