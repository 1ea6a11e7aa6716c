"""Which pages a request holds while it runs: from the cache, of its own, and back.

Of its page-table row the cache owns the columns below ``handle.depth`` (the request has
them locked), the request owns those above.
"""

from dataclasses import dataclass, field

import numpy as np

from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.kvcache.prefix_cache import NO_PAGES, Int32, Match
from skiff_runtime.scheduler.request import Request
from skiff_runtime.scheduler.slots import Slots


@dataclass(slots=True)
class Rewrites:
    """Duplicates that inserts of planned steps found."""

    cells: list[tuple[Request, Int32, Int32]] = field(default_factory=list)
    """Columns of a request's row that later steps must read from these pages of the cache."""
    duplicates: list[Int32] = field(default_factory=list)
    """The request's own pages there: free once the step that writes them has retired."""

    def forget(self, request: Request) -> None:
        """Drop the cells of a request that leaves but may come back, to other pages and perhaps to another row."""
        self.cells = [cells for cells in self.cells if cells[0] is not request]


class Tenancy:
    """Moves pages between allocator, requests and cache."""

    def __init__(self, memory: PagePool, slots: Slots) -> None:
        self._memory = memory
        self._cache = memory.cache
        self._slots = slots

    def match(self, request: Request) -> Match:
        """The cached prefix of a waiting request, locked."""
        match = self._cache.match(request.cacheable_tokens, salt=request.salt)
        self._cache.lock(match.handle)
        return match

    def release_match(self, match: Match) -> None:
        """Undo ``match``: the request has to wait."""
        self._cache.unlock(match.handle)

    def enter(self, request: Request, match: Match) -> None:
        """Give the request a slot and its cached pages."""
        request.handle = match.handle
        self._slots.open(request, match.pages)
        self._slots.computed[request.slot] = match.handle.depth * self._cache.page_size

    def share(self, request: Request, rewrites: Rewrites) -> None:
        """Offer to the cache what a planned prefill chunk computes.

        That is safe before the step has run, even for other rows of that step: steps run
        in order of launch, and each layer writes the KV of all rows before any row attends.
        Where the cache has a page already, this request computes it once more into its own
        (the last page of a prompt that is cached whole); later steps read the cache's.
        """
        columns, pages = self._insert(request)
        if len(columns):
            rewrites.cells.append((request, columns, pages))
            row = self._slots.pages[request.slot]
            rewrites.duplicates.append(row[columns])
            row[columns] = pages

    def leave(self, request: Request) -> None:
        """Take the slot and all pages from a request of which no step is in flight."""
        slot, slots = request.slot, self._slots
        assert not slots.num_in_flight_steps[slot] and request.handle is not None
        columns = NO_PAGES if request.corrupted else self._insert(request)[0]
        row, handle = slots.pages[slot, : slots.held[slot]], request.handle
        self._memory.free(np.concatenate([row[columns], row[handle.depth :]]))
        self._cache.unlock(handle)
        if request.corrupted:
            self._memory.forget(handle)
        request.handle = None
        slots.close(request)

    def owned(self) -> Int32:
        """Pages that belong to requests."""
        slots = self._slots
        rows = [NO_PAGES]
        for request in slots.requests():
            assert request.handle is not None
            rows.append(slots.pages[request.slot, request.handle.depth : slots.held[request.slot]])
        return np.concatenate(rows)

    def _insert(self, request: Request) -> tuple[Int32, Int32]:
        """Insert the whole pages computed so far, and hold the longer prefix instead of the old one.

        Their tokens are known: a step computes prompt tokens, or what a retired step sampled
        by the time that its own request may leave.
        """
        slot, slots, before = request.slot, self._slots, request.handle
        assert before is not None
        size = self._cache.page_size
        assert slots.computed[slot] <= slots.known[slot]
        whole = int(slots.computed[slot]) // size
        inserted = self._cache.insert(
            slots.tokens[slot, : whole * size], slots.pages[slot, :whole], after=before, salt=request.salt
        )
        self._cache.lock(inserted.handle)
        self._cache.unlock(before)
        request.handle = inserted.handle
        return inserted.columns, inserted.pages
