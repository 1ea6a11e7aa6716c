"""Requests that wait to run: first come, first served.

Its length is bounded by the front, which refuses what exceeds ``--max-queued-requests``.
"""

from collections import OrderedDict

from skiff_runtime.scheduler.request import Request


class RequestQueue:
    """A queue from which any request can leave at once."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Request] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Join at the end."""
        self._waiting[request.uid] = request

    def push_front(self, request: Request) -> None:
        """Come back after a retraction: before all who arrived later."""
        self._waiting[request.uid] = request
        self._waiting.move_to_end(request.uid, last=False)

    def first(self) -> Request:
        """Whose turn it is; the queue must not be empty."""
        return next(iter(self._waiting.values()))

    def remove(self, request: Request) -> None:
        """Leave, from wherever it stands."""
        del self._waiting[request.uid]
