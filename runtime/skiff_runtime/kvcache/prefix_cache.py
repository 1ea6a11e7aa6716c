"""The interface of prefix caches: which prefixes of a sequence are in the KV cache, and which requests use them.

A cache owns the pages that ``insert`` handed over to it; every other page belongs to the caller that
allocated it. A ``PrefixHandle`` names a cached prefix. A locked handle stays valid; an unlocked one is
valid only until the next call that changes the cache.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skiff_runtime.messages import CacheEvents

Int32 = NDArray[np.int32]
NO_PAGES: Int32 = np.empty(0, np.int32)


class PrefixHandle:
    """A cached prefix of ``depth`` whole pages."""

    __slots__ = ("depth",)

    depth: int

    def __init__(self, depth: int) -> None:
        self.depth = depth


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of a sequence: its handle and its pages int32[handle.depth]."""

    handle: PrefixHandle
    pages: Int32


@dataclass(frozen=True, slots=True)
class InsertResult:
    """The outcome of ``PrefixCache.insert``.

    The cache now owns the prefix of ``handle``. Where it had a page already, the page that the caller
    offered is a duplicate and still belongs to the caller: column ``columns[i]`` of the caller's page
    table must point at ``pages[i]`` before its own page there is freed.
    """

    handle: PrefixHandle
    columns: Int32
    pages: Int32


class PrefixCache(ABC):
    """Whole pages of computed prefixes, kept for later sequences that begin alike.

    ``salt`` separates namespaces: sequences share pages only under the same salt.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.cached_pages = 0
        """Pages that the cache owns."""
        self.evictable_pages = 0
        """Cached pages that are not locked."""
        self.version = 0
        """Increases whenever pages enter or leave the cache; ``count_cached_pages`` is constant between."""
        self.is_watched = False
        """True while changes are recorded, after ``watch``."""

    @abstractmethod
    def match(self, tokens: Int32, *, salt: bytes = b"") -> PrefixMatch:
        """Find the longest cached prefix of ``tokens`` int32[T], in whole pages, and mark it as used."""

    @abstractmethod
    def count_cached_pages(self, tokens: Int32, *, salt: bytes = b"") -> int:
        """Return the number of pages that ``match`` would find. Neither marks them as used nor splits a node."""

    @abstractmethod
    def insert(self, tokens: Int32, pages: Int32, *, after: PrefixHandle, salt: bytes = b"") -> InsertResult:
        """Hand over pages int32[P] that hold ``tokens`` int32[P * page_size], both from the sequence's start.

        ``after`` is the locked handle of a prefix of the sequence, usually the one it was matched with.
        Only pages behind that prefix can be new to the cache or duplicates.
        """

    @abstractmethod
    def lock(self, handle: PrefixHandle) -> None:
        """Keep a prefix from eviction until it has been unlocked as often as it was locked."""

    @abstractmethod
    def unlock(self, handle: PrefixHandle) -> None:
        """Undo one ``lock``."""

    @abstractmethod
    def evict(self, count: int) -> Int32:
        """Remove the ``count`` least recently used pages, or all evictable ones if there are fewer; return them."""

    @abstractmethod
    def invalidate(self, handle: PrefixHandle) -> Int32:
        """Remove the unlocked pages of all sequences that begin with this prefix's first page; return them.

        For prefixes whose pages may hold NaN, which would spread to every sequence that reads them.
        """

    @abstractmethod
    def discard(self, salt_prefix: bytes) -> Int32:
        """Remove the unlocked pages of all sequences whose salt begins with ``salt_prefix``; return them."""

    @abstractmethod
    def note_prompt_blocks(self, handle: PrefixHandle, blocks: Sequence[tuple[int, int]]) -> None:
        """Note which pages of a prefix are the last of a prompt block: pairs of (page, hash), in ascending order."""

    @abstractmethod
    def watch(self, *, prompts: bool, blocks: bool, tokens: bool = False) -> None:
        """Record changes of prompt blocks and of KV blocks, after a snapshot of those that are cached now.

        ``tokens``: KV blocks are recorded with their tokens.
        """

    @property
    @abstractmethod
    def has_pending_events(self) -> bool:
        """Return whether ``take_events`` would return anything."""

    @abstractmethod
    def take_events(self) -> CacheEvents | None:
        """Return what was recorded since the last call; a part of the snapshot if that is long."""

    @abstractmethod
    def check(self) -> Int32:
        """Assert that the counters agree with the content; return the pages that the cache owns."""
