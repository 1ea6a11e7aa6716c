"""A mirror of a prefix cache, built from its events alone."""

import numpy as np

from skiff_runtime.messages import CacheEvents, KVBlocksStored
from skiff_runtime.prompt_blocks import HASH_DTYPE


class CacheMirror:
    """The prompt blocks and KV blocks that a cache has reported and not removed since."""

    def __init__(self) -> None:
        self.prompts: set[int] = set()
        self.blocks: set[int] = set()
        self.snapshots = 0

    def apply(self, events: CacheEvents | None) -> None:
        """Apply the events of one step; assert that they make sense in this order."""
        if events is None:
            return
        if events.is_snapshot:
            self.snapshots += 1
            self.prompts.clear()
            self.blocks.clear()
        stored, removed = (
            set(np.frombuffer(data, HASH_DTYPE).tolist())
            for data in (events.prompts_stored, events.prompts_removed)
        )
        assert not stored & removed
        self.prompts = (self.prompts - removed) | stored
        for event in events.blocks:
            hashes = set(event.hashes)
            assert len(hashes) == len(event.hashes)
            if isinstance(event, KVBlocksStored):
                assert not hashes & self.blocks, "a block is stored once"
                assert event.parent is None or event.parent in self.blocks
                self.blocks |= hashes
            else:
                assert hashes <= self.blocks, "only a stored block is removed"
                self.blocks -= hashes
