"""The radix cache: a radix tree over runs of whole pages, after SGLang's RadixAttention (Zheng et al., 2024).

Each node holds the pages between its parent's prefix and its own. A parent finds a child by the bytes of
the child's first page; runs are compared in place with numpy, so a lookup copies no token. Keys of the
root's children begin with the salt, which separates namespaces within one tree.

Invariants, which ``check`` asserts: a node is locked at least as often as its children together, so the
ancestors of a locked node are locked too; an unlocked parent was used no earlier than its children; every evictable
leaf has an entry in the eviction heap. A lookup costs one dictionary access a node and one comparison of
its tokens; an eviction costs O(log nodes) and never walks the tree.
"""

import heapq

import numpy as np

from skiff_runtime.kvcache.prefix_cache import (
    NO_PAGES,
    InsertResult,
    Int32,
    PrefixCache,
    PrefixHandle,
    PrefixMatch,
)


class RadixNode(PrefixHandle):
    """A run of pages below a parent's prefix, and the handle of the prefix that ends with it.

    A split keeps this object as the lower part, so handles keep their meaning.
    """

    __slots__ = ("children", "in_heap", "key", "last_used", "locks", "pages", "parent", "serial", "tokens")

    def __init__(
        self,
        *,
        parent: "RadixNode | None",
        key: bytes,
        tokens: Int32,
        pages: Int32,
        last_used: int,
        serial: int,
    ) -> None:
        super().__init__((parent.depth if parent else 0) + len(pages))
        self.parent = parent
        self.key = key
        """Key in ``parent.children``: the bytes of the first page's tokens; below the root, salt + these."""
        self.tokens = tokens
        """int32[len(pages) * page_size]."""
        self.pages = pages
        self.children: dict[bytes, RadixNode] = {}
        self.locks = 0
        """Reference count: locks of handles that end here or below."""
        self.last_used = last_used
        """Logical time of the last use. Wall clocks would differ between ranks."""
        self.serial = serial
        """Order of creation, which breaks ties of ``last_used``."""
        self.in_heap = False
        """The eviction heap has an entry for this node."""

    @classmethod
    def root(cls) -> "RadixNode":
        """Return the empty prefix, shared by all namespaces."""
        return cls(parent=None, key=b"", tokens=np.empty(0, np.int32), pages=NO_PAGES, last_used=0, serial=0)

    @property
    def is_evictable(self) -> bool:
        """True for an unlocked leaf."""
        return not self.locks and not self.children and self.parent is not None


class EvictionHeap:
    """Evictable leaves, least recently used first: a lazy heap by logical time of last use.

    An entry is neither removed nor moved when its node is used, locked or gets a child; ``pop`` notices
    that. Each node has at most one entry, so the heap never outgrows the tree.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, RadixNode]] = []

    def push(self, node: RadixNode) -> None:
        """Add an evictable node, unless it has an entry already."""
        if not node.in_heap:
            node.in_heap = True
            heapq.heappush(self._entries, (node.last_used, node.serial, node))

    def pop(self) -> RadixNode | None:
        """Remove and return the least recently used evictable leaf; None without one."""
        while self._entries:
            last_used, _, node = heapq.heappop(self._entries)
            node.in_heap = False
            if not node.is_evictable:
                continue  # pushed again when its last lock or child goes
            if node.last_used == last_used:
                return node
            self.push(node)  # used since it was pushed: its entry has an old time
        return None


class RadixCache(PrefixCache):
    """Keeps every inserted prefix until its pages are needed; evicts the least recently used leaves first."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._root = RadixNode.root()
        self._heap = EvictionHeap()
        self._clock = 0
        self._serial = 0

    def match(self, tokens: Int32, *, salt: bytes = b"") -> PrefixMatch:
        node, runs = self._descend(self._root, tokens, salt)
        return PrefixMatch(node, np.concatenate(runs) if runs else NO_PAGES)

    def count_cached_pages(self, tokens: Int32, *, salt: bytes = b"") -> int:
        node = self._root
        while (child := self._find_child(node, tokens, salt)) is not None:
            same = self._count_common_pages(child, tokens)
            if same < len(child.pages):
                return node.depth + same
            node = child
        return node.depth

    def insert(self, tokens: Int32, pages: Int32, *, after: PrefixHandle, salt: bytes = b"") -> InsertResult:
        assert isinstance(after, RadixNode) and len(tokens) == len(pages) * self.page_size
        assert after.depth <= len(pages), "the sequence is shorter than the prefix it was matched with"
        node, runs = self._descend(after, tokens, salt)
        present = np.concatenate(runs) if runs else NO_PAGES
        differing = np.flatnonzero(pages[after.depth : node.depth] != present)
        if node.depth < len(pages):
            node = self._add_leaf(node, tokens, pages, salt)
        return InsertResult(node, (differing + after.depth).astype(np.int32), present[differing])

    def lock(self, handle: PrefixHandle) -> None:
        node: RadixNode | None = _as_node(handle)
        while node is not None:
            if not node.locks:
                self.evictable_pages -= len(node.pages)
            node.locks += 1
            node = node.parent

    def unlock(self, handle: PrefixHandle) -> None:
        self._clock += 1  # the end of a use is a use
        node: RadixNode | None = _as_node(handle)
        while node is not None:
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            node.last_used = self._clock
            if not node.locks:
                self.evictable_pages += len(node.pages)
                self._push_if_evictable(node)
            node = node.parent

    def evict(self, count: int) -> Int32:
        runs: list[Int32] = []
        missing = count
        while missing > 0 and (node := self._heap.pop()) is not None:
            run = node.pages[-missing:]  # from the end: the rest of the run stays a valid prefix
            self._truncate(node, len(run))
            runs.append(run)
            missing -= len(run)
        return self._give_up(runs)

    def invalidate(self, handle: PrefixHandle) -> Int32:
        node = _as_node(handle)
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
        return self._give_up(runs)

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

    def _check_node(self, node: RadixNode) -> None:
        assert len(node.tokens) == len(node.pages) * self.page_size
        assert node.in_heap or not node.is_evictable, "an evictable leaf that eviction would not find"
        assert node.locks >= sum(child.locks for child in node.children.values())
        for key, child in node.children.items():
            assert child.parent is node and child.key == key and len(child.pages)
            assert key.endswith(child.tokens[: self.page_size].tobytes())
            assert child.depth == node.depth + len(child.pages)
            assert child.last_used <= node.last_used or node.locks or node is self._root

    def _descend(self, node: RadixNode, tokens: Int32, salt: bytes) -> tuple[RadixNode, list[Int32]]:
        """Follow ``tokens`` below ``node`` as far as they are cached; return the last node and the runs of pages.

        Marks the nodes on the way as used. Splits the last one where the tokens diverge within it.
        """
        self._clock += 1
        runs: list[Int32] = []
        while (child := self._find_child(node, tokens, salt)) is not None:
            same = self._count_common_pages(child, tokens)
            node = child if same == len(child.pages) else self._split(child, same)
            node.last_used = self._clock
            runs.append(node.pages)
        return node, runs

    def _find_child(self, node: RadixNode, tokens: Int32, salt: bytes) -> RadixNode | None:
        """Return the child of ``node`` that shares at least its first page with ``tokens``."""
        if len(tokens) < (node.depth + 1) * self.page_size:
            return None
        return node.children.get(self._make_key(node, tokens, salt))

    def _make_key(self, node: RadixNode, tokens: Int32, salt: bytes) -> bytes:
        """Return the key, among the children of ``node``, of the page of ``tokens`` behind its prefix."""
        offset = node.depth * self.page_size
        page = tokens[offset : offset + self.page_size].tobytes()
        return page if node.parent else salt + page

    def _count_common_pages(self, child: RadixNode, tokens: Int32) -> int:
        """Return how many whole pages of a node's run ``tokens`` share."""
        offset = (child.depth - len(child.pages)) * self.page_size
        length = min(len(child.tokens), len(tokens) - offset)
        common = common_prefix_length(child.tokens[:length], tokens[offset : offset + length])
        return common // self.page_size

    def _split(self, lower: RadixNode, count: int) -> RadixNode:
        """Move the first ``count`` pages of a node into a new parent of it; return the new node."""
        parent, edge = lower.parent, count * self.page_size
        assert parent is not None and 0 < count < len(lower.pages)
        upper = self._make_node(parent, lower.key, lower.tokens[:edge], lower.pages[:count])
        upper.locks = lower.locks
        upper.last_used = lower.last_used
        parent.children[lower.key] = upper
        lower.parent = upper
        lower.tokens, lower.pages = lower.tokens[edge:], lower.pages[count:]
        lower.key = lower.tokens[: self.page_size].tobytes()
        upper.children[lower.key] = lower
        return upper

    def _add_leaf(self, node: RadixNode, tokens: Int32, pages: Int32, salt: bytes) -> RadixNode:
        """Add what follows the prefix of ``node`` as a new leaf below it; return the leaf."""
        key = self._make_key(node, tokens, salt)
        # Copies: the caller's buffers live on and change.
        leaf = self._make_node(
            node, key, tokens[node.depth * self.page_size :].copy(), pages[node.depth :].copy()
        )
        node.children[key] = leaf
        self.version += 1
        self.cached_pages += len(leaf.pages)
        self.evictable_pages += len(leaf.pages)
        self._push_if_evictable(leaf)
        return leaf

    def _make_node(self, parent: RadixNode, key: bytes, tokens: Int32, pages: Int32) -> RadixNode:
        self._serial += 1
        return RadixNode(
            parent=parent, key=key, tokens=tokens, pages=pages, last_used=self._clock, serial=self._serial
        )

    def _truncate(self, leaf: RadixNode, count: int) -> None:
        """Remove the last ``count`` pages of a leaf, and the leaf itself with its last page."""
        parent = leaf.parent
        assert parent is not None
        if count < len(leaf.pages):
            leaf.pages, leaf.depth = leaf.pages[:-count], leaf.depth - count
            leaf.tokens = leaf.tokens[: len(leaf.pages) * self.page_size]
            self._push_if_evictable(leaf)
        else:
            del parent.children[leaf.key]
            self._push_if_evictable(parent)

    def _detach(self, top: RadixNode) -> list[Int32]:
        """Remove an unlocked node and its descendants from the tree; return their runs of pages."""
        assert top.parent is not None
        del top.parent.children[top.key]
        runs: list[Int32] = []
        stack = [top]
        while stack:
            node = stack.pop()
            runs.append(node.pages)
            stack.extend(node.children.values())
            node.parent = None  # no longer evictable: the heap may still have an entry for it
            node.children = {}
        return runs

    def _give_up(self, runs: list[Int32]) -> Int32:
        """Count runs of pages out of the cache; return the pages."""
        pages = np.concatenate(runs) if runs else NO_PAGES
        self.version += len(runs)
        self.cached_pages -= len(pages)
        self.evictable_pages -= len(pages)
        return pages

    def _push_if_evictable(self, node: RadixNode) -> None:
        if node.is_evictable:
            self._heap.push(node)


def common_prefix_length(left: Int32, right: Int32) -> int:
    """Return the number of leading tokens that two runs of the same positive length share."""
    differs = left != right
    first = int(differs.argmax())
    return first if differs[first] else len(left)


def _as_node(handle: PrefixHandle) -> RadixNode:
    assert isinstance(handle, RadixNode)
    return handle
