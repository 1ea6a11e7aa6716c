"""Micro-benchmark of the radix cache: match and insert of 8k-token prompts, and eviction.

``python -m skiff_runtime.bench.offline.radix_cache`` prints a table of medians, and needs neither a model nor a GPU.
"""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Final

import numpy as np
from rich.console import Console
from rich.table import Table

from skiff_runtime.kvcache.page_pool import PagePool
from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.kvcache.radix import RadixCache

PROMPT_TOKENS: Final = 8192
PROMPTS: Final = 64
ROUNDS: Final = 40
PAGE_SIZES: Final = (1, 16, 64, 256)
VOCAB_SIZE: Final = 150_000
SHARED: Final = PROMPT_TOKENS // 2
MICROSECONDS: Final = 1e6


class FilledCache:
    """A page pool whose radix cache contains ``PROMPTS`` prompts that share their first half."""

    def __init__(self, page_size: int, seed: int = 0) -> None:
        self.page_size = page_size
        self._random = np.random.default_rng(seed)
        self._shared_half = self._draw_tokens(SHARED)
        self.prompts = [self.draw_prompt() for _ in range(PROMPTS)]
        pages = 2 * PROMPTS * PROMPT_TOKENS // page_size
        self.pool = PagePool(pages, RadixCache(page_size))
        for prompt in self.prompts:
            self.insert(prompt)

    def draw_prompt(self) -> Int32:
        """Draw a prompt: the shared half, and a random one."""
        return np.concatenate([self._shared_half, self._draw_tokens(PROMPT_TOKENS - SHARED)])

    def match(self, prompt: Int32) -> int:
        """Match, lock and unlock, as admission does. Returns the number of cached pages."""
        match = self.pool.cache.match(prompt)
        self.pool.cache.lock(match.handle)
        self.pool.cache.unlock(match.handle)
        return match.handle.depth

    def insert(self, prompt: Int32) -> None:
        """Insert a computed prompt as a request does: match, allocate the rest, insert."""
        cache = self.pool.cache
        match = cache.match(prompt)
        cache.lock(match.handle)
        missing = len(prompt) // self.page_size - match.handle.depth
        pages = np.concatenate([match.pages, self.pool.allocate(missing)])
        inserted = cache.insert(prompt, pages, after=match.handle)
        cache.unlock(match.handle)
        assert not len(inserted.columns)

    def evict(self) -> None:
        """Evict as many pages as a prompt has of its own, the least recently used first."""
        self.pool.free(self.pool.cache.evict((PROMPT_TOKENS - SHARED) // self.page_size))

    def _draw_tokens(self, count: int) -> Int32:
        return self._random.integers(0, VOCAB_SIZE, count, dtype=np.int32)


def measure(page_size: int) -> dict[str, float]:
    """Return the median microseconds of each operation."""
    cache = FilledCache(page_size)
    whole = PROMPT_TOKENS // page_size
    half_cached = cache.draw_prompt()
    assert cache.match(cache.prompts[0]) == whole and cache.match(half_cached) == whole // 2
    figures = {
        "match, all cached": _time(lambda round_: cache.match(cache.prompts[round_ % PROMPTS])),
        "match, half cached": _time(lambda round_: cache.match(half_cached)),
    }
    fresh = [cache.draw_prompt() for _ in range(ROUNDS)]
    figures["insert, half new"] = _time(lambda round_: cache.insert(fresh[round_]))
    figures["evict 4k tokens"] = _time(lambda round_: cache.evict())
    cache.pool.check(np.empty(0, np.int32))
    return figures


def _time(operation: Callable[[int], object]) -> float:
    seconds = []
    for round_ in range(ROUNDS):
        started = perf_counter()
        operation(round_)
        seconds.append(perf_counter() - started)
    return median(seconds) * MICROSECONDS


def main() -> None:
    """Measure every page size and print the table."""
    columns = {page_size: measure(page_size) for page_size in PAGE_SIZES}
    table = Table(
        title=f"radix cache, {PROMPT_TOKENS}-token prompts, {PROMPTS} in the tree (median microseconds)"
    )
    table.add_column("operation")
    for page_size in PAGE_SIZES:
        table.add_column(f"page {page_size}", justify="right")
    for name in columns[PAGE_SIZES[0]]:
        table.add_row(name, *(f"{figures[name]:.1f}" for figures in columns.values()))
    Console().print(table)


if __name__ == "__main__":
    main()
