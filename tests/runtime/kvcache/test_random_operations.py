"""Random operations of requests on a small page pool keep every page accounted for, and its content right.

The model remembers what each page was last written with. After every operation it checks that each page is
free, cached or owned exactly once, and that each running request's row holds exactly its own prefix: a page
that is freed, evicted or shared wrongly is noticed at once. A mirror that is built from the cache's events alone must hold what
the cache holds.
"""

import os
import zlib
from dataclasses import dataclass, field

import numpy as np
import pytest
from cache_mirror import CacheMirror
from histories import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from skiff_runtime.kvcache import radix
from skiff_runtime.kvcache.block_hash import hash_blocks
from skiff_runtime.kvcache.naive import NaiveCache
from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.kvcache.prefix_cache import Int32, PrefixCache, PrefixHandle
from skiff_runtime.kvcache.radix import RadixCache

CACHES: dict[str, type[PrefixCache]] = {"radix": RadixCache, "naive": NaiveCache}
SHORT = 1_000
"""Histories in ``make test``."""
FULL = int(os.environ.get("SKIFF_TEST_HISTORIES", "10000"))
"""Histories in ``make soak``."""


@dataclass(eq=False)
class Sequence:
    """A request: its tokens, its row of pages, the locked prefix of that row."""

    tokens: Int32
    salt: bytes
    handle: PrefixHandle
    row: list[int] = field(default_factory=list)

    @property
    def owned(self) -> list[int]:
        return self.row[self.handle.depth :]


class Interpreter:
    """Runs bytes as operations: three bytes are an operation, the index of a request, and an amount."""

    def __init__(self, page_size: int, num_pages: int, cache: str) -> None:
        self.size = page_size
        self.cache: PrefixCache = CACHES[cache](page_size)
        self.pool = PagePool(num_pages, self.cache)
        self.written: dict[int, bytes] = {}
        self.running: list[Sequence] = []
        self.waiting: list[tuple[Int32, bytes]] = []
        self.mirror = CacheMirror()
        self.watched = (False, False)
        self.noted: dict[bytes, int] = {}

    def prefix(self, tokens: Int32, salt: bytes, pages: int) -> bytes:
        return salt + b"|" + tokens[: pages * self.size].tobytes()

    def run(self, script: bytes) -> None:
        operations = (
            *(self.open, self.compute, self.compute, self.finish),
            *(self.abort, self.preempt, self.evict, self.invalidate, self.watch),
        )
        for operation, index, amount in zip(script[::3], script[1::3], script[2::3], strict=False):
            operations[operation % len(operations)](index, amount)
            self.check()
        while self.running:
            self.finish(0, 0)
        self.check()
        assert self.pool.available_pages == self.pool.total_pages
        self.pool.free(self.cache.evict(self.pool.total_pages))
        assert self.pool.free_pages == self.pool.total_pages

    def open(self, index: int, amount: int) -> None:
        """Admit a new request, or one that was preempted."""
        if self.waiting and amount % 2:
            tokens, salt = self.waiting.pop(0)
        else:
            bits = [int(bit) for bit in f"{index:08b}{amount:08b}"]
            tokens = np.repeat(np.array(bits, np.int32), self.size)[: self.size * (2 + amount % 5) + 1]
            salt = b"other" if index % 4 == 0 else b""
        match = self.cache.match(tokens[:-1], salt=salt)
        self.cache.lock(match.handle)
        assert match.handle.depth == len(match.pages)
        self.running.append(Sequence(tokens, salt, match.handle, match.pages.tolist()))

    def compute(self, index: int, amount: int) -> None:
        """Compute a chunk of some pages; mostly insert it into the cache, as a running request does."""
        if not self.running:
            return
        sequence = self.running[index % len(self.running)]
        count = min(1 + amount % 3, len(sequence.tokens) // self.size - len(sequence.row))
        count = min(count, self.pool.available_pages)
        for page in self.pool.allocate(count).tolist():
            sequence.row.append(page)
            self.written[page] = self.prefix(sequence.tokens, sequence.salt, len(sequence.row))
        if amount % 4:
            self.insert(sequence)

    def insert(self, sequence: Sequence) -> None:
        """Insert as the scheduler does after a chunk: use the cache's pages, free the duplicates."""
        row = np.array(sequence.row, np.int32)
        inserted = self.cache.insert(
            sequence.tokens[: len(row) * self.size], row, after=sequence.handle, salt=sequence.salt
        )
        self.cache.lock(inserted.handle)
        self.cache.unlock(sequence.handle)
        duplicates = row[inserted.columns]
        row[inserted.columns] = inserted.pages
        assert not set(duplicates.tolist()) & set(row.tolist())
        self.pool.free(duplicates)
        sequence.handle, sequence.row = inserted.handle, row.tolist()
        if isinstance(self.cache, RadixCache):
            self.note(sequence)

    def note(self, sequence: Sequence) -> None:
        """Note a prompt block that ends in every second page."""
        blocks = []
        for page in range(0, sequence.handle.depth, 2):
            prefix = self.prefix(sequence.tokens, sequence.salt, page + 1)
            self.noted[prefix] = zlib.crc32(prefix)
            blocks.append((page, zlib.crc32(prefix)))
        self.cache.note_prompt_blocks(sequence.handle, blocks)

    def watch(self, index: int, amount: int) -> None:
        """Begin to watch, or end it."""
        self.watched = bool(amount & 1), bool(amount & 2)
        self.cache.watch(prompts=self.watched[0], blocks=self.watched[1])
        if not any(self.watched):
            assert not self.cache.has_pending_events
            self.mirror = CacheMirror()

    def finish(self, index: int, amount: int) -> None:
        if self.running:
            self.insert(self.running[index % len(self.running)])
            self.abort(index, amount)

    def abort(self, index: int, amount: int) -> None:
        if self.running:
            sequence = self.running.pop(index % len(self.running))
            self.pool.free(np.array(sequence.owned, np.int32))
            self.cache.unlock(sequence.handle)

    def preempt(self, index: int, amount: int) -> None:
        """Preempt the youngest request."""
        if self.running:
            self.waiting.append((self.running[-1].tokens, self.running[-1].salt))
            self.finish(len(self.running) - 1, 0)

    def evict(self, index: int, amount: int) -> None:
        evictable, count = self.cache.evictable_pages, amount % 5
        pages = self.cache.evict(count)
        assert len(pages) == min(count, evictable)
        self.pool.free(pages)

    def invalidate(self, index: int, amount: int) -> None:
        """End a request whose pages may hold NaN: its prefix matches no longer, unless another request uses it."""
        if not self.running:
            return
        sequence = self.running[index % len(self.running)]
        self.abort(index, amount)
        self.pool.invalidate(sequence.handle)
        if not sequence.handle.depth:
            return  # it neither read nor cached a page
        rows = [other for other in self.running if other.salt == sequence.salt]
        in_use = max((self.count_common_pages(sequence, other) for other in rows), default=0)
        assert self.cache.count_cached_pages(sequence.tokens, salt=sequence.salt) <= in_use

    def count_common_pages(self, left: Sequence, right: Sequence) -> int:
        """Return the number of pages of cached prefix that two sequences share."""
        pages = 0
        depth = min(len(left.tokens) // self.size, right.handle.depth)
        while pages < depth and np.array_equal(
            left.tokens[: (pages + 1) * self.size], right.tokens[: (pages + 1) * self.size]
        ):
            pages += 1
        return pages

    def check(self) -> None:
        owned = [page for sequence in self.running for page in sequence.owned]
        self.pool.check(np.array(owned, np.int32))
        for sequence in self.running:
            for column, page in enumerate(sequence.row, start=1):
                assert self.written[page] == self.prefix(sequence.tokens, sequence.salt, column)
        self.check_mirror()

    def check_mirror(self) -> None:
        """Check what a watcher knows; while a snapshot is not complete, it must not know too much."""
        self.mirror.apply(self.cache.take_events())
        cached = [self.written[page] for page in self.cache.check().tolist()]
        self.noted = {prefix: block for prefix, block in self.noted.items() if prefix in cached}
        assert self.mirror.prompts == (set(self.noted.values()) if self.watched[0] else set())
        hashes = {self.hash(prefix) for prefix in cached} if self.watched[1] else set()
        assert self.mirror.blocks <= hashes
        assert self.cache.has_pending_events or self.mirror.blocks == hashes

    def hash(self, prefix: bytes) -> int:
        salt, _, tokens = prefix.partition(b"|")
        return hash_blocks(np.frombuffer(tokens, np.int32), self.size, parent=None, salt=salt)[-1]


HISTORIES = given(
    script=st.binary(min_size=30, max_size=300),
    page_size=st.sampled_from([1, 2, 4]),
    num_pages=st.integers(1, 20),
    cache=st.sampled_from(["radix", "radix", "radix", "naive"]),
)


def check_history(script: bytes, page_size: int, num_pages: int, cache: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(radix, "MAX_SNAPSHOT_PAGES", 2)  # so that changes come between the parts of a snapshot
        Interpreter(page_size, num_pages, cache).run(script)


@examples(SHORT, [HealthCheck.too_slow])
@HISTORIES
def test_every_page_is_held_once_with_the_right_content(
    script: bytes, page_size: int, num_pages: int, cache: str
) -> None:
    check_history(script, page_size, num_pages, cache)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@examples(FULL, [HealthCheck.too_slow])
@HISTORIES
def test_every_page_is_held_once_with_the_right_content_at_length(
    script: bytes, page_size: int, num_pages: int, cache: str
) -> None:
    check_history(script, page_size, num_pages, cache)
