"""Which leaf to give up next: a lazy heap by logical time of last use.

Entries are never removed or moved when a node is used, locked or gets children; the heap
finds that out when it pops them. Each node has at most one entry, so the heap never
outgrows the tree, and no eviction walks the tree.
"""

import heapq

from skiff_runtime.kvcache.node import Node


class EvictionHeap:
    """Unlocked leaves, the least recently used first."""

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, Node]] = []

    def push(self, node: Node) -> None:
        """Offer a node which may be evicted now."""
        if not node.queued:
            node.queued = True
            heapq.heappush(self._entries, (node.used, node.serial, node))

    def pop(self) -> Node | None:
        """Take the least recently used evictable leaf, if there is one."""
        while self._entries:
            used, _, node = heapq.heappop(self._entries)
            node.queued = False
            if not node.evictable:
                continue  # offered again when its last lock or child goes
            if node.used == used:
                return node
            self.push(node)
        return None
