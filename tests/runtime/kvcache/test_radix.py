"""The radix cache by example: matching, splitting, duplicates, namespaces, eviction order."""

import numpy as np
import pytest

from skiff_runtime.kvcache.namespace import CacheNamespace
from skiff_runtime.kvcache.page_allocator import PageAllocator
from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.kvcache.prefix_cache import InsertResult, Int32, PrefixCache
from skiff_runtime.kvcache.radix import RadixCache
from skiff_runtime.messages import KVBlocksRemoved


def ints(*values: int) -> Int32:
    return np.array(values, np.int32)


def insert(cache: PrefixCache, tokens: Int32, pages: Int32, salt: bytes = b"") -> InsertResult:
    """Insert as a request that matched nothing does."""
    return cache.insert(tokens, pages, after=cache.match(ints(), salt=salt).handle, salt=salt)


def matched(cache: PrefixCache, *tokens: int, salt: bytes = b"") -> list[int]:
    return [int(page) for page in cache.match(ints(*tokens), salt=salt).pages]


def test_only_whole_pages_match() -> None:
    cache = RadixCache(page_size=2)
    insert(cache, ints(1, 2, 3, 4), ints(7, 8))
    assert matched(cache, 1, 2, 3, 4, 5) == [7, 8]
    assert matched(cache, 1, 2, 3) == [7]
    assert matched(cache, 1, 2, 3, 9) == [7]
    assert matched(cache, 1) == []
    assert matched(cache, 2, 1) == []
    cache.check()


def test_split_keeps_handles_and_locks() -> None:
    cache = RadixCache(page_size=1)
    whole = insert(cache, ints(1, 2, 3), ints(0, 1, 2)).handle
    cache.lock(whole)
    assert insert(cache, ints(1, 5), ints(0, 4)).handle.depth == 2
    assert whole.depth == 3
    assert cache.evict(9).tolist() == [4]
    cache.unlock(whole)
    cache.check()
    assert cache.evict(9).tolist() == [1, 2, 0]


def test_insert_returns_duplicates_with_the_pages_to_use_instead() -> None:
    cache = RadixCache(page_size=2)
    insert(cache, ints(1, 2, 3, 4), ints(0, 1))
    again = insert(cache, ints(1, 2, 3, 4, 5, 6), ints(0, 8, 9))
    assert (again.columns.tolist(), again.pages.tolist()) == ([1], [1])
    assert matched(cache, 1, 2, 3, 4, 5, 6) == [0, 1, 9]
    assert cache.cached_pages == 3


def test_insert_continues_from_a_locked_prefix() -> None:
    cache = RadixCache(page_size=1)
    first = insert(cache, ints(1, 2), ints(0, 1)).handle
    cache.lock(first)
    second = cache.insert(ints(1, 2, 3), ints(0, 1, 5), after=first)
    assert second.handle.depth == 3
    assert len(second.columns) == 0
    assert matched(cache, 1, 2, 3) == [0, 1, 5]


def test_insert_copies_tokens_and_pages() -> None:
    cache = RadixCache(page_size=1)
    tokens, pages = ints(1, 2), ints(5, 6)
    insert(cache, tokens, pages)
    tokens[:], pages[:] = 0, 0
    assert matched(cache, 1, 2) == [5, 6]


def test_discard_removes_the_unlocked_sequences_of_a_salt_alone() -> None:
    cache = RadixCache(1)
    for first, salt in enumerate((b"", b"one", b"one more", b"two")):
        insert(cache, ints(1, 2), ints(2 * first, 2 * first + 1), salt=salt)
    locked = cache.match(ints(1), salt=b"one more").handle
    cache.lock(locked)
    assert sorted(cache.discard(b"one").tolist()) == [2, 3, 5]
    assert [len(matched(cache, 1, 2, salt=salt)) for salt in (b"", b"one", b"one more", b"two")] == [
        2,
        0,
        1,
        2,
    ]
    cache.unlock(locked)
    assert cache.discard(b"one").tolist() == [4]
    assert cache.discard(b"three").tolist() == []
    cache.check()


def test_blocks_of_a_replaced_adapter_are_held_until_its_last_copy_is_gone() -> None:
    """Two adapters of one name have the same names of KV blocks, while streams of the replaced one go on."""
    cache = RadixCache(1)
    cache.watch(prompts=False, blocks=True)
    cache.take_events()
    replaced, replacing = (CacheNamespace(b"key", number, "sql") for number in (1, 2))
    stored = []
    for first, namespace in enumerate((replaced, replacing)):
        insert(cache, ints(1, 2), ints(2 * first, 2 * first + 1), salt=namespace.encode())
        events = cache.take_events()
        assert events is not None
        stored += [each.hashes for each in events.blocks]
    assert stored[0] == stored[1]
    cache.watch(prompts=False, blocks=True)  # another subscriber
    assert cache.take_events() is not None
    assert len(cache.evict(1)) == 1, "the end of the first one"
    assert cache.take_events() is None
    cache.discard(CacheNamespace.adapter_prefix(1))
    assert cache.take_events() is None
    cache.discard(CacheNamespace.adapter_prefix(2))
    events = cache.take_events()
    assert events is not None and events.blocks == [KVBlocksRemoved(stored[0])]


def test_sequences_of_different_salts_do_not_share_pages() -> None:
    cache = RadixCache(page_size=1)
    insert(cache, ints(1, 2), ints(0, 1))
    insert(cache, ints(1, 2), ints(2, 3), salt=b"tenant")
    assert matched(cache, 1, 2) == [0, 1]
    assert matched(cache, 1, 2, salt=b"tenant") == [2, 3]
    assert matched(cache, 1, 2, salt=b"stranger") == []
    cache.check()


def test_eviction_takes_the_tail_of_the_least_recently_used_leaf() -> None:
    cache = RadixCache(page_size=1)
    insert(cache, ints(1, 2, 3), ints(0, 1, 2))
    insert(cache, ints(4, 5), ints(3, 4))
    matched(cache, 1, 2, 3)
    assert cache.evict(1).tolist() == [4]
    assert matched(cache, 4, 5) == [3]
    assert cache.evict(2).tolist() == [1, 2]
    assert (cache.cached_pages, cache.evictable_pages) == (2, 2)
    assert cache.evict(10).tolist() == [0, 3]
    cache.check()


def test_unlock_counts_as_use() -> None:
    cache = RadixCache(page_size=1)
    used = insert(cache, ints(1), ints(0)).handle
    cache.lock(used)
    insert(cache, ints(2), ints(1))
    cache.match(ints(2))
    cache.unlock(used)
    matched(cache, 3)
    assert cache.evict(1).tolist() == [1]


def test_extra_unlock_is_an_error() -> None:
    cache = RadixCache(page_size=1)
    handle = insert(cache, ints(1), ints(0)).handle
    cache.lock(handle)
    cache.unlock(handle)
    with pytest.raises(AssertionError, match="unlocked more often"):
        cache.unlock(handle)


def test_allocator_returns_pages_in_order_and_notices_double_free() -> None:
    pages = PageAllocator(4)
    assert pages.allocate(3).tolist() == [0, 1, 2]
    pages.free(ints(1, 0))
    assert pages.allocate(2).tolist() == [1, 0]
    pages.free(ints(2))
    with pytest.raises(AssertionError, match="double free"):
        pages.free(ints(2))
    with pytest.raises(AssertionError, match="double free"):
        pages.free(ints(1, 1))
    with pytest.raises(AssertionError, match="3 pages requested, 2 free"):
        pages.allocate(3)


def test_pool_evicts_only_as_many_pages_as_are_missing() -> None:
    pool = PagePool(4, RadixCache(page_size=1))
    insert(pool.cache, ints(1, 2, 3), pool.allocate(3))
    assert (pool.free_pages, pool.available_pages) == (1, 4)
    assert sorted(pool.allocate(2).tolist()) == [2, 3]
    assert pool.evicted_pages == 1
    pool.check(ints(2, 3))


@pytest.mark.parametrize(("owned", "fault"), [(ints(), "held 0 times"), (ints(0, 0), "held 2 times")])
def test_check_notices_leaked_and_shared_pages(owned: Int32, fault: str) -> None:
    pool = PagePool(2, RadixCache(page_size=1))
    pool.allocate(1)
    with pytest.raises(AssertionError, match=fault):
        pool.check(owned)


def test_flush_frees_only_unlocked_pages() -> None:
    pool = PagePool(6, RadixCache(page_size=1))
    insert(pool.cache, ints(1, 2, 3), pool.allocate(3))
    insert(pool.cache, ints(1, 5), ints(0, *pool.allocate(1)))
    held = pool.cache.match(ints(1, 5))
    pool.cache.lock(held.handle)
    assert sorted(pool.flush().tolist()) == [1, 2]
    assert (pool.free_pages, pool.evicted_pages) == (4, 0)
    pool.cache.unlock(held.handle)
    assert sorted(pool.flush().tolist()) == [0, 3]
    assert (pool.free_pages, pool.cache.cached_pages) == (6, 0)


@pytest.mark.parametrize("page_size", [1, 3])
def test_count_cached_pages_agrees_with_match(page_size: int) -> None:
    random = np.random.default_rng(3)
    cache, page = RadixCache(page_size), 0
    for _ in range(200):
        tokens = random.integers(0, 2, int(random.integers(0, 20))).astype(np.int32)
        salt = [b"", b"salt"][int(random.integers(0, 2))]
        count = cache.count_cached_pages(tokens, salt=salt)
        assert count == cache.match(tokens, salt=salt).handle.depth
        count = len(tokens) // page_size
        insert(cache, tokens[: count * page_size], ints(*range(page, page + count)), salt)
        assert cache.count_cached_pages(tokens, salt=salt) == count
        page += count
