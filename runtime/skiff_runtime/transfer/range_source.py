"""The interface of a source of byte ranges, and the files that are read from it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from skiff_runtime.errors import FetchError


class TransientSourceError(FetchError):
    """A failure that a retry may resolve, after ``wait_seconds`` at the earliest if the source demands that."""

    def __init__(self, message: str, *, wait_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


class RangesUnsupported(FetchError):
    """The source does not answer requests for ranges of a file; it may send the file in one stream."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """A file of a hub, an object of a store, or a layer of an artifact.

    ``name``: its path in the model's directory; ``key``: the source's name of it; ``digest``: ``sha256:HEX`` or
    ``md5:HEX`` of the content, "" if the source gives none; ``version``: the entity tag that each range must still have;
    ``modified``: the time of its last change, if the source gives one.
    """

    name: str
    key: str
    size_bytes: int
    digest: str = ""
    version: str = ""
    modified: str = ""

    def new_hash(self) -> "hashlib._Hash | None":
        """Return a hash of the digest's algorithm; None without a digest."""
        if not self.digest:
            return None
        return hashlib.new(self.digest.partition(":")[0], usedforsecurity=False)

    def matches(self, running: "hashlib._Hash | None") -> bool:
        """Return whether the hash of the content is the digest; True without a digest."""
        return running is None or running.hexdigest() == self.digest.partition(":")[2]


class RangeSource(Protocol):
    """A client that reads files. Its methods raise ``FetchError``, and ``TransientSourceError`` if a retry may help."""

    def supports_ranges(self, remote: RemoteObject) -> bool:
        """Return whether ``stream`` can start in the middle of a file."""
        ...

    def stream(self, remote: RemoteObject, start: int, stop: int) -> Iterator[Any]:
        """Yield the bytes from ``start`` to ``stop`` as buffers."""
        ...
