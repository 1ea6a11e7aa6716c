"""The radix cache: a tree of token runs in whole pages (after SGLang's RadixAttention).

Children are found by the bytes of their first page, runs are compared in place with
numpy: no token is copied on the way down. A salt goes before the first page's bytes
of the root's children, so namespaces need no trees of their own.
"""

import numpy as np

from skiff_runtime.kvcache.eviction import EvictionHeap
from skiff_runtime.kvcache.node import Node, common_prefix_length
from skiff_runtime.kvcache.prefix_cache import NO_PAGES, Handle, InsertResult, Int32, Match, PrefixCache


class RadixCache(PrefixCache):
    """Keeps every inserted prefix until memory is needed; evicts the least recently used leaves."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._root = Node.root()
        self._heap = EvictionHeap()
        self._clock = 0
        self._serial = 0

    def match(self, tokens: Int32, *, salt: bytes = b"") -> Match:
        node, runs = self._descend(self._root, tokens, salt)
        return Match(node, np.concatenate(runs) if runs else NO_PAGES)

    def depth(self, tokens: Int32, *, salt: bytes = b"") -> int:
        node = self._root
        while (child := self._child(node, tokens, salt)) is not None:
            same = self._shared_pages(child, tokens)
            if same < len(child.pages):
                return node.depth + same
            node = child
        return node.depth

    def insert(self, tokens: Int32, pages: Int32, *, after: Handle, salt: bytes = b"") -> InsertResult:
        assert isinstance(after, Node) and len(tokens) == len(pages) * self.page_size
        assert after.depth <= len(pages), "the sequence is shorter than the prefix it was matched with"
        node, runs = self._descend(after, tokens, salt)
        present = np.concatenate(runs) if runs else NO_PAGES
        moved = np.flatnonzero(pages[after.depth : node.depth] != present)
        if node.depth < len(pages):
            node = self._extend(node, tokens, pages, salt)
        return InsertResult(node, (moved + after.depth).astype(np.int32), present[moved])

    def lock(self, handle: Handle) -> None:
        node: Node | None = _node(handle)
        while node is not None:
            if not node.locks:
                self.evictable_pages -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, handle: Handle) -> None:
        self._clock += 1  # the end of a use is a use
        node: Node | None = _node(handle)
        while node is not None:
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            node.used = self._clock
            if not node.locks:
                self.evictable_pages += len(node.pages)
                self._offer(node)
            node = node.parent

    def evict(self, count: int) -> Int32:
        runs: list[Int32] = []
        missing = count
        while missing > 0 and (node := self._heap.pop()) is not None:
            run = node.pages[-missing:]
            self._cut(node, len(run))
            runs.append(run)
            missing -= len(run)
        pages = np.concatenate(runs) if runs else NO_PAGES
        self.changes += len(runs)
        self.cached_pages -= len(pages)
        self.evictable_pages -= len(pages)
        return pages

    def forget(self, handle: Handle) -> Int32:
        node = _node(handle)
        if node.parent is None:
            return NO_PAGES
        while node.parent is not self._root:
            assert node.parent is not None
            node = node.parent
        # A locked node keeps its ancestors locked, so an unlocked one can go with all that is below it.
        runs: list[Int32] = []
        stack = [node]
        while stack:
            node = stack.pop()
            if node.locks:
                stack.extend(node.children.values())
            else:
                runs += self._detach(node)
        pages = np.concatenate(runs) if runs else NO_PAGES
        self.changes += len(runs)
        self.cached_pages -= len(pages)
        self.evictable_pages -= len(pages)
        return pages

    def check(self) -> Int32:
        runs: list[Int32] = []
        evictable = 0
        stack = [self._root]
        while stack:
            node = stack.pop()
            self._check_node(node)
            runs.append(node.pages)
            evictable += 0 if node.locks else len(node.pages)
            stack.extend(node.children.values())
        pages = np.concatenate(runs)
        assert len(pages) == self.cached_pages, f"{len(pages)} pages cached, {self.cached_pages} counted"
        assert evictable == self.evictable_pages, f"{evictable} evictable, {self.evictable_pages} counted"
        return pages

    def _check_node(self, node: Node) -> None:
        assert len(node.tokens) == len(node.pages) * self.page_size
        assert node.queued or not node.evictable, "an evictable leaf that eviction would not find"
        assert node.locks >= sum(child.locks for child in node.children.values())
        for key, child in node.children.items():
            assert child.parent is node and child.key == key and len(child.pages)
            assert key.endswith(child.tokens[: self.page_size].tobytes())
            assert child.depth == node.depth + len(child.pages)
            assert child.used <= node.used or node.locks or node is self._root

    def _key(self, node: Node, tokens: Int32, salt: bytes) -> bytes:
        """The key, among the children of ``node``, of the page that follows its prefix."""
        offset = node.depth * self.page_size
        page = tokens[offset : offset + self.page_size].tobytes()
        return page if node.parent else salt + page

    def _descend(self, node: Node, tokens: Int32, salt: bytes) -> tuple[Node, list[Int32]]:
        """Follow ``tokens`` below ``node`` as far as they are cached; the end and the pages passed.

        Splits the last node where the tokens part from it, and marks all as used.
        """
        self._clock += 1
        runs: list[Int32] = []
        while (child := self._child(node, tokens, salt)) is not None:
            same = self._shared_pages(child, tokens)
            node = child if same == len(child.pages) else self._split(child, same)
            node.used = self._clock
            runs.append(node.pages)
        return node, runs

    def _child(self, node: Node, tokens: Int32, salt: bytes) -> Node | None:
        """Where ``tokens`` go on below the prefix of ``node`` for at least one cached page."""
        if len(tokens) < (node.depth + 1) * self.page_size:
            return None
        return node.children.get(self._key(node, tokens, salt))

    def _shared_pages(self, child: Node, tokens: Int32) -> int:
        """How many of a node's pages ``tokens`` go along with."""
        offset = (child.depth - len(child.pages)) * self.page_size
        length = min(len(child.tokens), len(tokens) - offset)
        return common_prefix_length(child.tokens[:length], tokens[offset : offset + length]) // self.page_size

    def _split(self, lower: Node, count: int) -> Node:
        """Put the first ``count`` pages of a node into a new parent of it; the new node."""
        parent, edge = lower.parent, count * self.page_size
        assert parent is not None and 0 < count < len(lower.pages)
        upper = self._new(parent, lower.key, lower.tokens[:edge], lower.pages[:count])
        upper.locks = lower.locks
        upper.used = lower.used
        parent.children[lower.key] = upper
        lower.parent = upper
        lower.tokens, lower.pages = lower.tokens[edge:], lower.pages[count:]
        lower.key = lower.tokens[: self.page_size].tobytes()
        upper.children[lower.key] = lower
        return upper

    def _extend(self, node: Node, tokens: Int32, pages: Int32, salt: bytes) -> Node:
        """Hang what follows the prefix of ``node`` below it as a new leaf; the leaf."""
        key = self._key(node, tokens, salt)
        # Copies: the caller's buffers live on and change.
        leaf = self._new(node, key, tokens[node.depth * self.page_size :].copy(), pages[node.depth :].copy())
        node.children[key] = leaf
        self.changes += 1
        self.cached_pages += len(leaf.pages)
        self.evictable_pages += len(leaf.pages)
        self._offer(leaf)
        return leaf

    def _new(self, parent: Node, key: bytes, tokens: Int32, pages: Int32) -> Node:
        self._serial += 1
        return Node(parent=parent, key=key, tokens=tokens, pages=pages, used=self._clock, serial=self._serial)

    def _cut(self, leaf: Node, count: int) -> None:
        """Drop the last ``count`` pages of a leaf, and the leaf with its last page."""
        parent = leaf.parent
        assert parent is not None
        if count < len(leaf.pages):
            leaf.pages, leaf.depth = leaf.pages[:-count], leaf.depth - count
            leaf.tokens = leaf.tokens[: len(leaf.pages) * self.page_size]
            self._offer(leaf)
        else:
            del parent.children[leaf.key]
            self._offer(parent)

    def _detach(self, top: Node) -> list[Int32]:
        """Take an unlocked node and all below it out of the tree; their pages, a run for each node."""
        assert top.parent is not None
        del top.parent.children[top.key]
        runs: list[Int32] = []
        stack = [top]
        while stack:
            node = stack.pop()
            runs.append(node.pages)
            stack.extend(node.children.values())
            node.parent = None  # no longer evictable: the heap may still hold an entry of it
            node.children = {}
        return runs

    def _offer(self, node: Node) -> None:
        if node.evictable:
            self._heap.push(node)


def _node(handle: Handle) -> Node:
    assert isinstance(handle, Node)
    return handle
