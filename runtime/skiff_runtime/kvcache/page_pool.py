"""The pool of KV pages as the scheduler sees it: free pages and evictable cached pages are one supply."""

import numpy as np

from skiff_runtime.kvcache.page_allocator import PageAllocator
from skiff_runtime.kvcache.prefix_cache import Int32, PrefixCache, PrefixHandle


class PagePool:
    """A page allocator with a prefix cache that gives up pages when too few are free."""

    def __init__(self, num_pages: int, cache: PrefixCache) -> None:
        self.cache = cache
        self._allocator = PageAllocator(num_pages)
        self.evicted_pages = 0
        """Pages evicted since the start because a request needed them; ``flush`` does not count."""

    @property
    def total_pages(self) -> int:
        return self._allocator.total

    @property
    def free_pages(self) -> int:
        return self._allocator.free_count

    @property
    def available_pages(self) -> int:
        """Pages that ``allocate`` can return: free ones, and cached ones that are not locked."""
        return self._allocator.free_count + self.cache.evictable_pages

    def allocate(self, count: int) -> Int32:
        """Take ``count`` available pages int32[count], evicting cached ones where too few are free."""
        missing = count - self._allocator.free_count
        if missing > 0:
            evicted = self.cache.evict(missing)
            self.evicted_pages += len(evicted)
            self._allocator.free(evicted)
        return self._allocator.allocate(count)

    def free(self, pages: Int32) -> None:
        """Return pages that the caller owns."""
        self._allocator.free(pages)

    def flush(self) -> Int32:
        """Free every cached page that is not locked; return these pages."""
        pages = self.cache.evict(self.cache.evictable_pages)
        self._allocator.free(pages)
        return pages

    def invalidate(self, handle: PrefixHandle) -> None:
        """Free the unlocked pages of all cached sequences that begin with this prefix's first page."""
        self._allocator.free(self.cache.invalidate(handle))

    def discard(self, salt_prefix: bytes) -> None:
        """Free the unlocked pages of all cached sequences whose salt begins with ``salt_prefix``."""
        self._allocator.free(self.cache.discard(salt_prefix))

    def check(self, owned: Int32) -> None:
        """Assert that each page is exactly one of free, cached and ``owned`` (by requests)."""
        held = np.concatenate([self._allocator.free_pages(), self.cache.check(), owned])
        counts = np.bincount(held, minlength=self.total_pages)
        wrong = np.flatnonzero(counts != 1)
        assert not len(wrong), f"page {wrong[0]} is held {counts[wrong[0]]} times, of {len(wrong)} wrong"
