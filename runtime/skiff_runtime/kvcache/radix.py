"""The radix cache: a radix tree over runs of whole pages, after SGLang's RadixAttention (Zheng et al., 2024).

Each node holds the pages between its parent's prefix and its own. A parent finds a child by the bytes of
the child's first page; runs are compared in place with numpy, so a lookup copies no token. Keys of the
root's children begin with the salt, which separates namespaces within one tree.

Invariants, which ``check`` asserts: a node is locked at least as often as its children together, so the
ancestors of a locked node are locked too; an unlocked parent was used no earlier than its children; every evictable
leaf has an entry in the eviction heap. A lookup costs one dictionary access a node and one comparison of
its tokens; an eviction costs O(log nodes) and never walks the tree.

For routers, nodes know the prompt blocks that end in their pages, and while KV blocks are watched the hashes of their
pages. A node has hashes only if its ancestors have.
"""

import heapq
from collections.abc import Sequence
from typing import Final

import numpy as np

from skiff_runtime.kvcache.block_hash import hash_blocks
from skiff_runtime.kvcache.cache_events import CacheEventLog
from skiff_runtime.kvcache.namespace import CacheNamespace
from skiff_runtime.kvcache.prefix_cache import (
    NO_PAGES,
    InsertResult,
    Int32,
    PrefixCache,
    PrefixHandle,
    PrefixMatch,
)
from skiff_runtime.messages import CacheEvents, Wire

MAX_SNAPSHOT_PAGES: Final = 2048
"""Pages that are hashed between two steps for a snapshot: about 3 ms of a CPU."""


class RadixNode(PrefixHandle):
    """A run of pages below a parent's prefix, and the handle of the prefix that ends with it.

    A split keeps this object as the lower part, so handles keep their meaning.
    """

    __slots__ = (
        "block_hashes",
        "children",
        "in_heap",
        "key",
        "last_used",
        "locks",
        "pages",
        "parent",
        "prompt_blocks",
        "serial",
        "tokens",
    )

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
        self.prompt_blocks: list[tuple[int, int]] = []
        """Pairs (page, hash): a prompt block ends in this page, counted from the root."""
        self.block_hashes: list[int] | None = None
        """Hashes of the pages as KV blocks, or None while they are not known."""

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
        self._events = CacheEventLog()
        self._watches_prompts = False
        self._watches_blocks = False
        self._watches_tokens = False
        self._noted: set[int] = set()  # the prompt blocks of all nodes
        self._unhashed: list[RadixNode] = []  # nodes from which the snapshot of KV blocks goes on

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

    def note_prompt_blocks(self, handle: PrefixHandle, blocks: Sequence[tuple[int, int]]) -> None:
        node = _as_node(handle)
        for page, block in reversed(blocks):
            assert page < node.depth
            while page < node.depth - len(node.pages):
                assert node.parent is not None
                node = node.parent
            # Texts of other tokens, or of other lengths, may put a block into another page, too: the first one counts.
            if block not in self._noted:
                self._noted.add(block)
                node.prompt_blocks.append((page, block))
                if self._watches_prompts:
                    self._events.record_prompt(block, stored=True)

    def watch(self, *, prompts: bool, blocks: bool, tokens: bool = False) -> None:
        self._watches_prompts, self._watches_blocks, self._watches_tokens = prompts, blocks, tokens
        self.is_watched = prompts or blocks
        self._events.begin_snapshot()
        self._unhashed = list(self._root.children.values()) if blocks else []
        if prompts:
            for block in sorted(self._noted):
                self._events.record_prompt(block, stored=True)
        if not (prompts or blocks):
            self._events.take()
        if blocks:
            self._forget_hashes()

    @property
    def has_pending_events(self) -> bool:
        return not self._events.is_empty or bool(self._unhashed)

    def take_events(self) -> CacheEvents | None:
        left = MAX_SNAPSHOT_PAGES
        while self._unhashed and left > 0:
            left -= self._hash_next()
        return self._events.take()

    def _forget_hashes(self) -> None:
        """Drop all hashes: nodes that were added while the cache was not watched have none."""
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            node.block_hashes = None
            stack.extend(node.children.values())

    def _hash_next(self) -> int:
        """Hash the next node of the snapshot of KV blocks; return the number of its pages."""
        node = self._unhashed.pop()
        if node.parent is None or node.parent.children.get(node.key) is not node:
            return 0  # removed meanwhile
        if node.block_hashes is not None:
            return 0  # reached by another way
        if node.parent is not self._root and node.parent.block_hashes is None:
            # A split put a node above it.
            self._unhashed += [node, node.parent]
            return 0
        self._hash(node)
        self._unhashed.extend(node.children.values())
        return len(node.pages)

    def _hash(self, node: RadixNode) -> None:
        """Hash the pages of a node whose ancestors have hashes, and record them as stored."""
        parent = node.parent
        assert parent is not None
        namespace = self._find_namespace(node)
        before = parent.block_hashes[-1] if parent.block_hashes else None
        node.block_hashes = hash_blocks(
            node.tokens, self.page_size, parent=before, salt=namespace.hash_salt()
        )
        token_ids = node.tokens.astype(Wire.TOKEN, copy=False).tobytes() if self._watches_tokens else b""
        self._events.record_stored(node.block_hashes, before, token_ids, namespace)

    def _find_namespace(self, node: RadixNode) -> CacheNamespace:
        """Return the namespace of a node: the key of its uppermost ancestor contains it."""
        while node.parent is not self._root:
            assert node.parent is not None
            node = node.parent
        return CacheNamespace.decode(node.key[: -self.page_size * node.tokens.itemsize])

    def _forget(self, node: RadixNode, depth: int) -> None:
        """Record that the pages of a node behind the first ``depth`` of its prefix are removed."""
        for page, block in node.prompt_blocks:
            if page >= depth:
                self._noted.remove(block)
                if self._watches_prompts:
                    self._events.record_prompt(block, stored=False)
        node.prompt_blocks = [each for each in node.prompt_blocks if each[0] < depth]
        if node.block_hashes is not None:
            left = max(0, depth - (node.depth - len(node.pages)))
            if self._watches_blocks:
                self._events.record_removed(node.block_hashes[left:])
            node.block_hashes = node.block_hashes[:left]

    def check(self) -> Int32:
        runs: list[Int32] = []
        evictable = 0
        noted: list[int] = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            self._check_node(node)
            runs.append(node.pages)
            noted += [block for _, block in node.prompt_blocks]
            evictable += 0 if node.locks else len(node.pages)
            stack.extend(node.children.values())
        assert len(noted) == len(self._noted) and set(noted) == self._noted, (
            "prompt blocks are counted wrongly"
        )
        pages = np.concatenate(runs)
        assert len(pages) == self.cached_pages, f"{len(pages)} pages cached, {self.cached_pages} counted"
        assert evictable == self.evictable_pages, f"{evictable} evictable, {self.evictable_pages} counted"
        return pages

    def _check_node(self, node: RadixNode) -> None:
        assert len(node.tokens) == len(node.pages) * self.page_size
        assert node.in_heap or not node.is_evictable, "an evictable leaf that eviction would not find"
        assert node.locks >= sum(child.locks for child in node.children.values())
        first = node.depth - len(node.pages)
        assert all(first <= page < node.depth for page, _ in node.prompt_blocks)
        assert node.block_hashes is None or len(node.block_hashes) == len(node.pages)
        for key, child in node.children.items():
            assert child.block_hashes is None or node is self._root or node.block_hashes is not None
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
        if lower.prompt_blocks:
            upper.prompt_blocks = [each for each in lower.prompt_blocks if each[0] < upper.depth]
            lower.prompt_blocks = [each for each in lower.prompt_blocks if each[0] >= upper.depth]
        if lower.block_hashes is not None:
            upper.block_hashes, lower.block_hashes = lower.block_hashes[:count], lower.block_hashes[count:]
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
        if self._watches_blocks and (node is self._root or node.block_hashes is not None):
            self._hash(leaf)
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
        if leaf.prompt_blocks or leaf.block_hashes is not None:
            self._forget(leaf, leaf.depth - count)
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
            self._forget(node, 0)
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
