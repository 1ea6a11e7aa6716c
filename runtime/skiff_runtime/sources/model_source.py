"""The interface of a source of model files: a listing, and streams of byte ranges."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from skiff_runtime.errors import FetchError

MAX_FILES: Final = 10_000
MAX_MODEL_BYTES: Final = 8 << 40


class TransientSourceError(FetchError):
    """A failure that a retry may resolve."""


@dataclass(frozen=True, slots=True)
class RemoteObject:
    """An object of a store, or a layer of an artifact.

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


@dataclass(frozen=True, slots=True)
class SourceListing:
    """The files of a model. ``version`` changes with any of them. ``archives``: tar files that contain more files."""

    version: str
    files: Sequence[RemoteObject]
    archives: Sequence[RemoteObject] = ()


class ModelSource(Protocol):
    """A client of one source for one model. Its methods raise ``FetchError``, and ``TransientSourceError`` if a retry may help."""

    def list_objects(self) -> SourceListing:
        """Return the files at the source."""
        ...

    def supports_ranges(self, remote: RemoteObject) -> bool:
        """Return whether ``stream`` can start in the middle of an object."""
        ...

    def stream(self, remote: RemoteObject, start: int, stop: int) -> Iterator[Any]:
        """Yield the bytes from ``start`` to ``stop`` as buffers."""
        ...


def check_limits(sizes: Sequence[int], what: str) -> None:
    """Raise ``FetchError`` if there are more files or bytes than a model has."""
    if len(sizes) > MAX_FILES or sum(sizes) > MAX_MODEL_BYTES or min(sizes, default=0) < 0:
        raise FetchError(
            f"{what} has {len(sizes)} files of {sum(sizes)} bytes; at most {MAX_FILES} files of {MAX_MODEL_BYTES} bytes "
            "are downloaded: name the model's own folder"
        )
