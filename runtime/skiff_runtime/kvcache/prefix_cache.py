"""The interface of prefix caches: what of a sequence is in KV memory already, and who uses it.

A cache owns the pages that it took by ``insert``; everybody else owns what they allocated.
A handle names a cached prefix. It stays valid while it is locked; unlocked, only until
the next call that changes the cache.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
NO_PAGES: Int32 = np.empty(0, np.int32)


class Handle:
    """A cached prefix of ``depth`` whole pages."""

    __slots__ = ("depth",)

    depth: int

    def __init__(self, depth: int) -> None:
        self.depth = depth


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a sequence: its handle and its pages int32[handle.depth]."""

    handle: Handle
    pages: Int32


@dataclass(frozen=True, slots=True)
class InsertResult:
    """What became of the pages that a caller offered.

    The cache now owns the prefix of ``handle``. For pages of it that it had already, the
    caller's ones are duplicates and still the caller's: column ``columns[i]`` of its page
    table must point at ``pages[i]`` before its own page there is freed.
    """

    handle: Handle
    columns: Int32
    pages: Int32


class PrefixCache(ABC):
    """Whole pages of finished prefixes, kept for sequences that begin alike.

    ``salt`` separates namespaces: sequences share pages only under one salt.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.cached_pages = 0
        """Pages that the cache owns."""
        self.evictable_pages = 0
        """Those of them that nobody has locked."""
        self.changes = 0
        """How often pages were taken or given up: while it stays, so does ``depth`` of anything."""

    @abstractmethod
    def match(self, tokens: Int32, *, salt: bytes = b"") -> Match:
        """The longest prefix of ``tokens`` int32[T], in whole pages, that is cached."""

    @abstractmethod
    def depth(self, tokens: Int32, *, salt: bytes = b"") -> int:
        """How many pages ``match`` would find; this is no use of them, and changes nothing."""

    @abstractmethod
    def insert(self, tokens: Int32, pages: Int32, *, after: Handle, salt: bytes = b"") -> InsertResult:
        """Offer pages int32[P] which hold ``tokens`` int32[P * page_size], from the sequence's start.

        ``after`` is a locked handle of a prefix of it (that of the match), from which on pages
        are new to the cache or duplicates.
        """

    @abstractmethod
    def lock(self, handle: Handle) -> None:
        """Keep a prefix from eviction until it is unlocked as often as it was locked."""

    @abstractmethod
    def unlock(self, handle: Handle) -> None:
        """Undo one ``lock``."""

    @abstractmethod
    def evict(self, count: int) -> Int32:
        """Give up the ``count`` least recently used pages, or all evictable ones if they are fewer."""

    @abstractmethod
    def forget(self, handle: Handle) -> Int32:
        """Give up the unlocked pages of all sequences that begin with the first page of this prefix; these pages.

        For a prefix whose pages may hold NaN: sequences that share pages with it would only compute NaN again.
        """

    @abstractmethod
    def check(self) -> Int32:
        """Assert that the cache's books agree with its content; the pages that it owns."""
