"""Random histories of requests over a tiny page pool keep the books, and every page its content.

The model remembers what each page was last written with. After every event it asks that
pages are free, cached or owned exactly once, and that each live request's row holds
exactly its own prefix: a page freed, evicted or shared wrongly shows at once.
"""

import os
from dataclasses import dataclass, field

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.kvcache.prefix_cache import Handle, Int32

HISTORIES = int(os.environ.get("SKIFF_TEST_HISTORIES", "10000"))


@dataclass(eq=False)
class Sequence:
    """One request: its tokens, its row of pages, the locked prefix of that row."""

    tokens: Int32
    salt: bytes
    handle: Handle
    row: list[int] = field(default_factory=list)

    @property
    def owned(self) -> list[int]:
        return self.row[self.handle.depth :]


class History:
    """Interprets bytes as events: (what, whom, how much)."""

    def __init__(self, page_size: int, num_pages: int, cache: str) -> None:
        self.size = page_size
        self.memory = PagePool(num_pages=num_pages, page_size=page_size, cache=cache)
        self.cache = self.memory.cache
        self.written: dict[int, bytes] = {}
        self.running: list[Sequence] = []
        self.waiting: list[tuple[Int32, bytes]] = []

    def prefix(self, tokens: Int32, salt: bytes, pages: int) -> bytes:
        return salt + b"|" + tokens[: pages * self.size].tobytes()

    def play(self, script: bytes) -> None:
        events = (
            *(self.open, self.compute, self.compute, self.finish),
            *(self.abort, self.preempt, self.evict, self.forget),
        )
        for what, whom, amount in zip(script[::3], script[1::3], script[2::3], strict=False):
            events[what % len(events)](whom, amount)
            self.check()
        while self.running:
            self.finish(0, 0)
        self.check()
        assert self.memory.available_pages == self.memory.total_pages
        self.memory.free(self.cache.evict(self.memory.total_pages))
        assert self.memory.free_pages == self.memory.total_pages

    def open(self, whom: int, amount: int) -> None:
        """A request arrives, or one that was preempted comes back."""
        if self.waiting and amount % 2:
            tokens, salt = self.waiting.pop(0)
        else:
            bits = [int(bit) for bit in f"{whom:08b}{amount:08b}"]
            tokens = np.repeat(np.array(bits, np.int32), self.size)[: self.size * (2 + amount % 5) + 1]
            salt = b"other" if whom % 4 == 0 else b""
        match = self.cache.match(tokens[:-1], salt=salt)
        self.cache.lock(match.handle)
        assert match.handle.depth == len(match.pages)
        self.running.append(Sequence(tokens, salt, match.handle, match.pages.tolist()))

    def compute(self, whom: int, amount: int) -> None:
        """A chunk of some pages, offered to the cache as an unfinished request does."""
        if not self.running:
            return
        sequence = self.running[whom % len(self.running)]
        count = min(1 + amount % 3, len(sequence.tokens) // self.size - len(sequence.row))
        count = min(count, self.memory.available_pages)
        for page in self.memory.allocate(count).tolist():
            sequence.row.append(page)
            self.written[page] = self.prefix(sequence.tokens, sequence.salt, len(sequence.row))
        if amount % 4:
            self.insert(sequence)

    def insert(self, sequence: Sequence) -> None:
        """What the scheduler does after a chunk: take the cache's pages, free the duplicates."""
        row = np.array(sequence.row, np.int32)
        inserted = self.cache.insert(
            sequence.tokens[: len(row) * self.size], row, after=sequence.handle, salt=sequence.salt
        )
        self.cache.lock(inserted.handle)
        self.cache.unlock(sequence.handle)
        duplicates = row[inserted.columns]
        row[inserted.columns] = inserted.pages
        assert not set(duplicates.tolist()) & set(row.tolist())
        self.memory.free(duplicates)
        sequence.handle, sequence.row = inserted.handle, row.tolist()

    def finish(self, whom: int, amount: int) -> None:
        if self.running:
            self.insert(self.running[whom % len(self.running)])
            self.abort(whom, amount)

    def abort(self, whom: int, amount: int) -> None:
        if self.running:
            sequence = self.running.pop(whom % len(self.running))
            self.memory.free(np.array(sequence.owned, np.int32))
            self.cache.unlock(sequence.handle)

    def preempt(self, whom: int, amount: int) -> None:
        """The youngest gives its memory back and waits."""
        if self.running:
            self.waiting.append((self.running[-1].tokens, self.running[-1].salt))
            self.finish(len(self.running) - 1, 0)

    def evict(self, whom: int, amount: int) -> None:
        evictable, asked = self.cache.evictable_pages, amount % 5
        pages = self.cache.evict(asked)
        assert len(pages) == min(asked, evictable)
        self.memory.free(pages)

    def forget(self, whom: int, amount: int) -> None:
        """A request ends because its pages may hold NaN: what begins like it is matched no more, unless it is in use."""
        if not self.running:
            return
        sequence = self.running[whom % len(self.running)]
        self.abort(whom, amount)
        self.memory.forget(sequence.handle)
        if not sequence.handle.depth:
            return  # it neither read nor cached a page
        rows = [other for other in self.running if other.salt == sequence.salt]
        in_use = max((self.common(sequence, other) for other in rows), default=0)
        assert self.cache.depth(sequence.tokens, salt=sequence.salt) <= in_use

    def common(self, left: Sequence, right: Sequence) -> int:
        """Pages of cached prefix that two sequences share."""
        pages = 0
        depth = min(len(left.tokens) // self.size, right.handle.depth)
        while pages < depth and np.array_equal(
            left.tokens[: (pages + 1) * self.size], right.tokens[: (pages + 1) * self.size]
        ):
            pages += 1
        return pages

    def check(self) -> None:
        owned = [page for sequence in self.running for page in sequence.owned]
        self.memory.check(np.array(owned, np.int32))
        for sequence in self.running:
            for column, page in enumerate(sequence.row, start=1):
                assert self.written[page] == self.prefix(sequence.tokens, sequence.salt, column)


@settings(
    max_examples=HISTORIES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    script=st.binary(min_size=30, max_size=300),
    page_size=st.sampled_from([1, 2, 4]),
    num_pages=st.integers(1, 20),
    cache=st.sampled_from(["radix", "radix", "radix", "naive"]),
)
def test_every_page_is_held_once_and_holds_what_it_should(
    script: bytes, page_size: int, num_pages: int, cache: str
) -> None:
    History(page_size, num_pages, cache).play(script)
