"""A file on its way in: grows, survives interruption, and is checked before it gets its name."""

import hashlib
import os
from pathlib import Path
from typing import Final

from skiff_runtime.errors import FetchError
from skiff_runtime.hub.listing import RemoteFile

_READ_BYTES: Final = 1 << 20


class PartialFile:
    """Bytes received so far of one remote file, with their running checksum."""

    def __init__(self, directory: Path, file: RemoteFile) -> None:
        self._file = file
        self.path = directory / file.partial_name
        self._stream = self.path.open("ab+")
        self._hash = _new_hash(file)
        self.received_bytes = 0
        self._reread()

    def _reread(self) -> None:
        if os.fstat(self._stream.fileno()).st_size > self._file.size_bytes:
            self.restart()
            return
        self._stream.seek(0)
        while chunk := self._stream.read(_READ_BYTES):
            self._hash.update(chunk)
            self.received_bytes += len(chunk)

    def append(self, chunk: bytes) -> None:
        """Take the next bytes; FetchError when there are more than announced."""
        if self.received_bytes + len(chunk) > self._file.size_bytes:
            self.restart()
            raise FetchError(
                f"{self._file.name}: the hub sent more than the {self._file.size_bytes} bytes it announced"
            )
        self._stream.write(chunk)
        self._hash.update(chunk)
        self.received_bytes += len(chunk)

    def restart(self) -> None:
        """Forget what was received."""
        self._stream.truncate(0)
        self._hash = _new_hash(self._file)
        self.received_bytes = 0

    def is_whole(self) -> bool:
        """Whether as many bytes have come as were announced."""
        return self.received_bytes == self._file.size_bytes

    def finish(self, target: Path) -> bool:
        """Move the whole file to ``target`` if its checksum is right; else forget it and return False."""
        if self._hash.hexdigest() != self._file.digest:
            self.restart()
            return False
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self.path.replace(target)
        return True

    def close(self) -> None:
        """Keep what was received for a later attempt."""
        self._stream.close()


def _new_hash(file: RemoteFile) -> "hashlib._Hash":
    if file.algorithm == "sha256":
        return hashlib.sha256(usedforsecurity=False)
    # git names a blob by the sha1 of a short header and the content.
    return hashlib.sha1(f"blob {file.size_bytes}\0".encode(), usedforsecurity=False)
