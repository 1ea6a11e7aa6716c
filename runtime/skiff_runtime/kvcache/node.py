"""A node of the radix tree: a run of whole pages that sequences share."""

import numpy as np

from skiff_runtime.kvcache.prefix_cache import NO_PAGES, Handle, Int32


class Node(Handle):
    """The pages between a parent's prefix and its own; a handle of the prefix that ends here.

    A split keeps this object as the lower part, so handles keep their meaning.
    """

    __slots__ = ("children", "key", "locks", "pages", "parent", "queued", "serial", "tokens", "used")

    def __init__(
        self, *, parent: "Node | None", key: bytes, tokens: Int32, pages: Int32, used: int, serial: int
    ) -> None:
        super().__init__((parent.depth if parent else 0) + len(pages))
        self.parent = parent
        self.key = key
        """Under which the parent lists it: the bytes of its first page's tokens."""
        self.tokens = tokens
        """int32[len(pages) * page_size]."""
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        """How many locked handles end at or below it."""
        self.used = used
        """Logical time of its last use; wall clocks would differ between ranks."""
        self.serial = serial
        """Order of creation: decides between nodes used at the same time."""
        self.queued = False
        """Whether the eviction heap holds an entry of it."""

    @classmethod
    def root(cls) -> "Node":
        """The empty prefix, shared by all namespaces."""
        return cls(parent=None, key=b"", tokens=np.empty(0, np.int32), pages=NO_PAGES, used=0, serial=0)

    @property
    def evictable(self) -> bool:
        """A leaf that nobody uses."""
        return not self.locks and not self.children and self.parent is not None


def common_prefix_length(left: Int32, right: Int32) -> int:
    """How many leading tokens two runs of one equal, positive length share."""
    differs = left != right
    first = int(differs.argmax())
    return first if differs[first] else len(left)
