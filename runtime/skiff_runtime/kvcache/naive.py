"""The prefix cache that caches nothing (``--disable-radix-cache``): every request computes its whole prompt."""

from collections.abc import Sequence
from typing import Final

from skiff_runtime.kvcache.cache_events import CacheEventLog
from skiff_runtime.kvcache.prefix_cache import (
    NO_PAGES,
    InsertResult,
    Int32,
    PrefixCache,
    PrefixHandle,
    PrefixMatch,
)
from skiff_runtime.messages import CacheEvents


class NaiveCache(PrefixCache):
    """Matches nothing and accepts no page."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._empty_prefix: Final = PrefixHandle(0)
        self._events = CacheEventLog()

    def match(self, tokens: Int32, *, salt: bytes = b"") -> PrefixMatch:
        return PrefixMatch(self._empty_prefix, NO_PAGES)

    def count_cached_pages(self, tokens: Int32, *, salt: bytes = b"") -> int:
        return 0

    def insert(self, tokens: Int32, pages: Int32, *, after: PrefixHandle, salt: bytes = b"") -> InsertResult:
        return InsertResult(self._empty_prefix, NO_PAGES, NO_PAGES)

    def lock(self, handle: PrefixHandle) -> None:
        """Do nothing: there is no page to keep."""

    def unlock(self, handle: PrefixHandle) -> None:
        """Do nothing: there is no page to give up."""

    def evict(self, count: int) -> Int32:
        return NO_PAGES

    def invalidate(self, handle: PrefixHandle) -> Int32:
        return NO_PAGES

    def discard(self, salt_prefix: bytes) -> Int32:
        return NO_PAGES

    def note_prompt_blocks(self, handle: PrefixHandle, blocks: Sequence[tuple[int, int]]) -> None:
        """Do nothing: no page is cached."""

    def watch(self, *, prompts: bool, blocks: bool, tokens: bool = False) -> None:
        """Begin with a snapshot, which is empty, as is everything after it."""
        if prompts or blocks:
            self._events.begin_snapshot()

    @property
    def has_pending_events(self) -> bool:
        return not self._events.is_empty

    def take_events(self) -> CacheEvents | None:
        return self._events.take()

    def check(self) -> Int32:
        return NO_PAGES
