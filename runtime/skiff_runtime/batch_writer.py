"""A thread that writes items in batches, so that neither a slow file nor a system call for each item delays the event loop.

A thread that was woken for every item would cost more than the item: each wake-up takes a system call, and two threads
that run Python pass the interpreter's lock to and fro. So the thread sleeps for ``INTERVAL_SECONDS`` after each write, and
takes all that has come meanwhile. An item that comes after a pause is written at once.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

INTERVAL_SECONDS: Final = 0.05
MAX_WAITING_ITEMS: Final = 1 << 16
MAX_ITEMS_PER_WRITE: Final = 1024
CLOSE_SECONDS: Final = 5.0

ItemT = TypeVar("ItemT")


class BatchWriter(Generic[ItemT]):
    """A queue with one thread behind it, which never blocks those that put items into it."""

    def __init__(self, name: str, write: Callable[[list[ItemT]], None]) -> None:
        """Start the thread ``name``, which passes at most ``MAX_ITEMS_PER_WRITE`` items at a time to ``write``.

        ``write`` must not raise.
        """
        self._write = write
        self._items: deque[ItemT] = deque()
        self._arrived = threading.Event()
        self._closing = threading.Event()
        self.dropped = 0
        """The number of items that were dropped because ``MAX_WAITING_ITEMS`` were waiting."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: ItemT) -> None:
        """Write an item soon, or count it as dropped. Any thread may call this."""
        if len(self._items) >= MAX_WAITING_ITEMS:
            self.dropped += 1
            return
        self._items.append(item)
        if not self._arrived.is_set():
            self._arrived.set()

    def close(self) -> None:
        """Write what waits, for ``CLOSE_SECONDS`` at most, and end the thread. For other threads than this."""
        self._closing.set()
        self._arrived.set()
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        while not self._closing.is_set():
            self._arrived.wait()
            self._arrived.clear()  # before the items are taken: one that comes behind them sets it again
            self._write_waiting()
            self._closing.wait(INTERVAL_SECONDS)
        self._write_waiting()

    def _write_waiting(self) -> None:
        while self._items:
            count = min(len(self._items), MAX_ITEMS_PER_WRITE)
            self._write([self._items.popleft() for _ in range(count)])
