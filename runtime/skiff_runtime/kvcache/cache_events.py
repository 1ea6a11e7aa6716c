"""The record of changes of a prefix cache, for routers: KV blocks that are stored and removed, and prompt blocks likewise.

Nothing is recorded until ``PrefixCache.watch``. What is recorded then leaves with the results of the next step.
"""

from collections import Counter

import numpy as np

from skiff_runtime.kvcache.namespace import CacheNamespace
from skiff_runtime.messages import CacheEvents, KVBlocksRemoved, KVBlocksStored
from skiff_runtime.prompt_blocks import HASH_DTYPE

KVEvent = KVBlocksStored | KVBlocksRemoved


class CacheEventLog:
    """Changes since the last ``take``."""

    def __init__(self) -> None:
        self._prompts: dict[int, bool] = {}
        self._blocks: list[KVEvent] = []
        self._is_snapshot = False
        self._adapter_blocks: Counter[int] = Counter()
        """The copies of each KV block of an adapter. One that replaces another under its name has the same block hashes."""

    @property
    def is_empty(self) -> bool:
        """Return whether ``take`` would return None."""
        return not (self._prompts or self._blocks or self._is_snapshot)

    def begin_snapshot(self) -> None:
        """Drop what is recorded: what follows is the whole content of the cache."""
        self._prompts.clear()
        self._blocks.clear()
        self._adapter_blocks.clear()
        self._is_snapshot = True

    def record_prompt(self, block: int, *, stored: bool) -> None:
        """Record that a prompt block has entered or left the cache; only its last change counts."""
        self._prompts[block] = stored

    def record_stored(
        self, hashes: list[int], parent: int | None, token_ids: bytes, namespace: CacheNamespace
    ) -> None:
        """Record KV blocks that follow each other, behind the block ``parent``; ``token_ids`` as in ``KVBlocksStored``."""
        adapter = namespace.adapter_id, namespace.adapter_name
        self._blocks.append(KVBlocksStored(hashes, parent, token_ids, *adapter))
        if namespace.adapter_id:
            self._adapter_blocks.update(hashes)

    def record_removed(self, hashes: list[int]) -> None:
        """Record KV blocks that are gone, but for those that the cache holds once more under the same name."""
        if gone := [each for each in hashes if self._remove_copy(each)]:
            self._blocks.append(KVBlocksRemoved(gone))

    def _remove_copy(self, block: int) -> bool:
        """Remove one copy of a block from the count, and return whether none is left."""
        copies = self._adapter_blocks[block]
        if copies > 1:
            self._adapter_blocks[block] = copies - 1
            return False
        self._adapter_blocks.pop(block, None)
        return True

    def take(self) -> CacheEvents | None:
        """Return what was recorded since the last call, or None if nothing was."""
        if self.is_empty:
            return None
        events = CacheEvents(
            is_snapshot=self._is_snapshot,
            prompts_stored=_to_bytes([block for block, stored in self._prompts.items() if stored]),
            prompts_removed=_to_bytes([block for block, stored in self._prompts.items() if not stored]),
            blocks=self._blocks,
        )
        self._prompts, self._blocks, self._is_snapshot = {}, [], False
        return events


def _to_bytes(blocks: list[int]) -> bytes:
    return np.array(blocks, HASH_DTYPE).tobytes()
