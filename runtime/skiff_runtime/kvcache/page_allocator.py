"""The allocator of KV pages: a stack of free page ids, the same on every rank."""

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.kvcache.prefix_cache import Int32


class PageAllocator:
    """Allocates pages ``0 .. total - 1`` in an order that depends only on the calls made, so ranks agree."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.free_count = total
        # The top of the stack is its end: fresh pages come out in ascending order.
        self._stack: Int32 = np.arange(total - 1, -1, -1, dtype=np.int32)
        self._taken: NDArray[np.bool_] = np.zeros(total, np.bool_)
        self._marks: Int32 = np.zeros(total, np.int32)

    def allocate(self, count: int) -> Int32:
        """Take ``count`` pages int32[count]. Precondition: ``count`` pages are free."""
        assert 0 <= count <= self.free_count, f"{count} pages requested, {self.free_count} free"
        bottom = self.free_count - count
        pages = self._stack[bottom : self.free_count][::-1].copy()
        self.free_count = bottom
        self._taken[pages] = True
        return pages

    def free(self, pages: Int32) -> None:
        """Return pages to the stack. Freeing a free page, or one page twice in a call, is a programming error."""
        count = len(pages)
        if not count:
            return
        # A page that occurs twice keeps only the last of its marks: cheaper than sorting.
        marks = np.arange(count, dtype=np.int32)
        self._marks[pages] = marks
        assert self._taken[pages].all() and (self._marks[pages] == marks).all(), f"double free in {pages}"
        self._taken[pages] = False
        self._stack[self.free_count : self.free_count + count] = pages[::-1]
        self.free_count += count

    def free_pages(self) -> Int32:
        """Return the ids of the free pages int32[free_count]."""
        return self._stack[: self.free_count].copy()
