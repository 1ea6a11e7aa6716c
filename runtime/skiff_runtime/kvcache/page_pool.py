"""KV memory as the scheduler sees it: free pages and cached pages are one supply."""

import numpy as np

from skiff_runtime.kvcache.naive import NaiveCache
from skiff_runtime.kvcache.page_allocator import PageAllocator
from skiff_runtime.kvcache.prefix_cache import Handle, Int32, PrefixCache
from skiff_runtime.kvcache.radix import RadixCache

PREFIX_CACHES: dict[str, type[PrefixCache]] = {"radix": RadixCache, "naive": NaiveCache}


class PagePool:
    """An allocator and the prefix cache that gives pages back to it when they are needed."""

    def __init__(self, *, num_pages: int, page_size: int, cache: str) -> None:
        self.cache = PREFIX_CACHES[cache](page_size)
        self._allocator = PageAllocator(num_pages)
        self.evicted_pages = 0
        """How many pages the cache has given up since the start because others needed them."""

    @property
    def total_pages(self) -> int:
        return self._allocator.total

    @property
    def free_pages(self) -> int:
        return self._allocator.free_count

    @property
    def available_pages(self) -> int:
        """Pages that can be had at once: free, or cached and used by nobody."""
        return self._allocator.free_count + self.cache.evictable_pages

    def allocate(self, count: int) -> Int32:
        """Take ``count`` of the available pages, evicting cached ones where too few are free."""
        missing = count - self._allocator.free_count
        if missing > 0:
            evicted = self.cache.evict(missing)
            self.evicted_pages += len(evicted)
            self._allocator.free(evicted)
        return self._allocator.allocate(count)

    def free(self, pages: Int32) -> None:
        """Give back pages that the caller owns."""
        self._allocator.free(pages)

    def flush(self) -> Int32:
        """Free every cached page that nobody has locked; these pages."""
        pages = self.cache.evict(self.cache.evictable_pages)
        self._allocator.free(pages)
        return pages

    def forget(self, handle: Handle) -> None:
        """Free the unlocked pages of every cached sequence that shares its first page with this prefix."""
        self._allocator.free(self.cache.forget(handle))

    def check(self, owned: Int32) -> None:
        """Assert that each page is exactly one of free, cached and ``owned`` (by requests)."""
        held = np.concatenate([self._allocator.free_pages(), self.cache.check(), owned])
        counts = np.bincount(held, minlength=self.total_pages)
        wrong = np.flatnonzero(counts != 1)
        assert not len(wrong), f"page {wrong[0]} is held {counts[wrong[0]]} times, of {len(wrong)} wrong"
