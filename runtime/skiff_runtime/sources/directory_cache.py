"""One model of an object store or a registry in the cache.

::

    CACHE/skiff--SCHEME--NAME--HASH/
      lock                  held (flock) by the process that downloads
      model/                the directory that is served; it appears when all files are complete and verified
      model/.skiff.json     its version at the source, with the names and sizes of its files
      partial-VERSION/      files of a download that is not complete, kept for its resumption

Reading a complete model takes no lock and writes nothing, so the cache can be mounted read-only and needs no network.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from skiff_runtime.contract import FLAG_DOWNLOAD_DIR
from skiff_runtime.errors import FetchError
from skiff_runtime.hub.model_cache import SPARE_BYTES
from skiff_runtime.sources.source_reference import SourceReference, directory_name

MANIFEST: Final = ".skiff.json"
_PARTIAL: Final = "partial-"


class DirectoryCache:
    """The part of a cache directory that belongs to one model."""

    def __init__(self, cache_dir: Path, reference: SourceReference) -> None:
        self.root = cache_dir / directory_name(reference)
        self.lock_path = self.root / "lock"
        self.model = self.root / "model"

    def prepare(self) -> None:
        """Create the directory. Raises ``OSError`` if it is not writable."""
        self.root.mkdir(parents=True, exist_ok=True)
        if not os.access(self.root, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.root))

    def find_complete(self) -> Path | None:
        """Return the model's directory if it is complete: every file has its size."""
        try:
            files = json.loads((self.model / MANIFEST).read_text())["files"]
            complete = all((self.model / name).stat().st_size == size for name, size in files.items())
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return self.model if complete else None

    def open_partial(self, version: str) -> Path:
        """Return the directory of the download of a version; what is left of other versions is removed."""
        partial = self.root / f"{_PARTIAL}{version}"
        for other in self.root.glob(f"{_PARTIAL}*"):
            if other != partial:
                shutil.rmtree(other)
        (partial / "files").mkdir(parents=True, exist_ok=True)
        return partial

    def check_space(self, needed_bytes: int) -> None:
        """Raise ``FetchError``, with both sizes, if the volume has no room."""
        free_bytes = shutil.disk_usage(self.root).free
        if needed_bytes > 0 and needed_bytes + SPARE_BYTES > free_bytes:
            raise FetchError(
                f"not enough space in {self.root}: {(needed_bytes + SPARE_BYTES) / 1e9:.2f} GB are needed, "
                f"{free_bytes / 1e9:.2f} GB are free; use a larger volume, or another {FLAG_DOWNLOAD_DIR}"
            )

    def publish(self, partial: Path, source: str, version: str, names: Iterable[str]) -> Path:
        """Make ``partial``'s files the model, by one rename; a damaged model that is in its place is removed."""
        files = partial / "files"
        sizes = {name: (files / name).stat().st_size for name in names}
        manifest = {"source": source, "version": version, "files": sizes}
        with (files / MANIFEST).open("w") as stream:
            json.dump(manifest, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        if self.model.exists():
            shutil.rmtree(self.model)
        files.rename(self.model)
        for directory in (self.model, self.root):
            _sync_directory(directory)
        shutil.rmtree(partial, ignore_errors=True)
        return self.model


def _sync_directory(path: Path) -> None:
    """Write the names of a directory to the disk, where the file system supports that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
