"""KV cache manager: allocates, shares and frees the pages of running requests.

In a request's row of the page table, the prefix cache owns the columns below ``handle.depth`` (the request
has locked them), and the request owns the columns above.
"""

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.kvcache.prefix_cache import NO_PAGES, Int32, PrefixMatch
from skiff_runtime.scheduler.request import Request
from skiff_runtime.scheduler.slots import SlotIndices, Slots


class PageTableFixup(NamedTuple):
    """Columns of a request's row that steps after the current one must read from pages of the prefix cache."""

    request: Request
    columns: Int32
    pages: Int32


@dataclass(slots=True)
class PageTableFixups:
    """Consequences of duplicate pages: the cache had pages that a planned chunk computes once more."""

    pending: list[PageTableFixup] = field(default_factory=list)
    duplicates: list[Int32] = field(default_factory=list)
    """The requests' own pages there. They are free once the step that writes them has retired."""

    def discard(self, request: Request) -> None:
        """Drop the fixups of a preempted request: when it returns, it may have other pages and another slot."""
        self.pending = [fixup for fixup in self.pending if fixup.request is not request]

    def take_duplicates(self) -> list[Int32]:
        """Return the duplicates found since the last call."""
        taken, self.duplicates = self.duplicates, []
        return taken


class KVCacheManager:
    """Moves pages between the page pool, the slots of requests and the prefix cache."""

    def __init__(self, pool: PagePool, slots: Slots) -> None:
        self._pool = pool
        self._cache = pool.cache
        self._slots = slots

    @property
    def page_size(self) -> int:
        return self._cache.page_size

    @property
    def available_pages(self) -> int:
        return self._pool.available_pages

    def match_prefix(self, request: Request) -> PrefixMatch:
        """Match a waiting request with the prefix cache, and lock what matches."""
        match = self._cache.match(request.cacheable_tokens, salt=request.salt)
        self._cache.lock(match.handle)
        return match

    def estimate_uncached_tokens(self, request: Request) -> int:
        """Return the number of tokens of a request that are not cached; all of them while the cache is not watched."""
        if not self._cache.is_watched:
            return len(request.tokens)
        cached = self._cache.count_cached_pages(request.cacheable_tokens, salt=request.salt)
        return len(request.tokens) - cached * self._cache.page_size

    def release_match(self, match: PrefixMatch) -> None:
        """Undo ``match_prefix`` for a request that has to wait."""
        self._cache.unlock(match.handle)

    def allocate(self, request: Request, match: PrefixMatch) -> None:
        """Give the request a slot whose first pages are those of its match."""
        request.handle = match.handle
        self._slots.open(request, match.pages, match.handle.depth * self._cache.page_size)

    def append_pages(self, slot: int, count: int) -> tuple[int, Int32]:
        """Allocate ``count`` pages for one slot; return the first column that they fill, and the pages."""
        pages = self._pool.allocate(count)
        return self._slots.append_pages(slot, pages), pages

    def append_page_each(self, slots: SlotIndices) -> tuple[Int32, Int32]:
        """Allocate one page for each of these slots; return the columns that they fill, and the pages."""
        pages = self._pool.allocate(len(slots))
        return self._slots.append_page_each(slots, pages), pages

    def cache_chunk(self, request: Request, fixups: PageTableFixups) -> None:
        """Insert what a planned prefill chunk computes into the prefix cache, before the step has run.

        That is safe even for other rows of the same step: steps run in the order of their launch, and each
        layer stores the KV of all rows before any row attends. Where the cache has a page already (the last
        page of a prompt that is cached whole), this step still computes and reads the request's own page;
        later steps read the cache's.
        """
        columns, pages = self._insert(request)
        if len(columns):
            fixups.pending.append(PageTableFixup(request, columns, pages))
            fixups.duplicates.append(self._slots.replace_pages(request.slot, columns, pages))

    def free(self, request: Request) -> None:
        """Free the slot and the pages of a request that no step in flight uses.

        Its whole pages go to the prefix cache, unless its logits contain NaN: then the cached sequences that
        begin with the same page are invalidated instead.
        """
        slot, slots = request.slot, self._slots
        assert not slots.num_in_flight_steps[slot] and request.handle is not None
        duplicates = NO_PAGES if request.has_nan else self._insert(request)[0]
        row, handle = slots.pages[slot, : slots.num_pages[slot]], request.handle
        self._pool.free(np.concatenate([row[duplicates], row[handle.depth :]]))
        self._cache.unlock(handle)
        if request.has_nan:
            self._pool.invalidate(handle)
        request.handle = None
        slots.close(request)

    def owned_pages(self) -> Int32:
        """Return the pages that requests own."""
        slots = self._slots
        rows = [NO_PAGES]
        for request in slots.requests():
            assert request.handle is not None
            rows.append(slots.pages[request.slot, request.handle.depth : slots.num_pages[request.slot]])
        return np.concatenate(rows)

    def _insert(self, request: Request) -> tuple[Int32, Int32]:
        """Insert the whole pages computed so far; return columns and pages of the cache's where it had them.

        The request then holds a lock on the longer prefix instead of the old one. The tokens of these pages
        are known: a step computes prompt tokens, or tokens that an earlier step sampled, and that step has
        retired by the time that the request is freed.
        """
        slot, slots, before = request.slot, self._slots, request.handle
        assert before is not None
        size = self._cache.page_size
        assert slots.num_computed_tokens[slot] <= slots.num_tokens[slot]
        whole = int(slots.num_computed_tokens[slot]) // size
        inserted = self._cache.insert(
            slots.tokens[slot, : whole * size], slots.pages[slot, :whole], after=before, salt=request.salt
        )
        # Lock before unlock: the old prefix is part of the new one and must not become evictable between.
        self._cache.lock(inserted.handle)
        self._cache.unlock(before)
        request.handle = inserted.handle
        if request.num_noted_blocks < len(request.prompt_blocks):
            self._note_prompt_blocks(request, whole)
        return inserted.columns, inserted.pages

    def _note_prompt_blocks(self, request: Request, cached_pages: int) -> None:
        """Note the prompt blocks that end in the first ``cached_pages`` pages of a request, all of them cached."""
        assert request.handle is not None
        first, blocks = request.num_noted_blocks, request.prompt_blocks
        end = bisect_left(blocks, cached_pages, lo=first, key=lambda each: each[0])
        self._cache.note_prompt_blocks(request.handle, blocks[first:end])
        request.num_noted_blocks = end
