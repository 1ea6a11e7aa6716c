"""The cache that keeps nothing: every sequence computes all of its tokens."""

from typing import Final

from skiff_runtime.kvcache.prefix_cache import NO_PAGES, Handle, InsertResult, Int32, Match, PrefixCache


class NaiveCache(PrefixCache):
    """Matches nothing and takes no page."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._nothing: Final = Handle(0)

    def match(self, tokens: Int32, *, salt: bytes = b"") -> Match:
        return Match(self._nothing, NO_PAGES)

    def depth(self, tokens: Int32, *, salt: bytes = b"") -> int:
        return 0

    def insert(self, tokens: Int32, pages: Int32, *, after: Handle, salt: bytes = b"") -> InsertResult:
        return InsertResult(self._nothing, NO_PAGES, NO_PAGES)

    def lock(self, handle: Handle) -> None:
        """There is nothing to keep."""

    def unlock(self, handle: Handle) -> None:
        """There is nothing to keep."""

    def evict(self, count: int) -> Int32:
        return NO_PAGES

    def forget(self, handle: Handle) -> Int32:
        return NO_PAGES

    def check(self) -> Int32:
        return NO_PAGES
