"""One model of an object store or a registry in the cache.

::

    CACHE/skiff--SCHEME--NAME--HASH/
      lock                  held (flock) by the process that downloads
      model/                the directory that is served; it appears when all files are complete and verified
      model/.skiff.json     its version at the source, with the names and sizes of its files, and SHA-256 where known
      partial-VERSION/      files of a download that is not complete, kept for its resumption

Reading a complete model takes no lock and writes nothing, so the cache can be mounted read-only and needs no network.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from skiff_runtime.contract import FLAG_DOWNLOAD_DIR
from skiff_runtime.errors import FetchError
from skiff_runtime.hub.model_cache import SPARE_BYTES
from skiff_runtime.hub.repository import RemoteFile, RepositoryListing
from skiff_runtime.sources.source_reference import SourceReference, directory_name
from skiff_runtime.transfer.download_progress import report_progress

MANIFEST: Final = ".skiff.json"
_PARTIAL: Final = "partial-"
_DIGEST_THREADS: Final = 4
_READ_BYTES: Final = 4 << 20


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
        return None if self._read_manifest() is None else self.model

    def list_verified(self) -> RepositoryListing | None:
        """List the files of a complete model with their SHA-256; None if it is not complete, or some are not known."""
        manifest = self._read_manifest()
        digests = {} if manifest is None else manifest.get("sha256") or {}
        if manifest is None or digests.keys() != manifest["files"].keys():
            return None
        files = [RemoteFile(name, size, digests[name]) for name, size in manifest["files"].items()]
        return RepositoryListing(manifest["version"], files)

    def snapshot(self, _: str) -> Path:
        """Return the directory of the files of a version; there is one at a time."""
        return self.model

    def complete_digests(self) -> None:
        """Compute the SHA-256 that a complete model's manifest lacks, because the source gave none, and record them."""
        manifest = self._read_manifest()
        if manifest is None:
            return
        known: dict[str, str] = manifest.get("sha256") or {}
        missing = [name for name in manifest["files"] if name not in known]
        if not missing:
            return
        read = dict.fromkeys(missing, 0)

        def compute(name: str) -> str:
            running = hashlib.sha256(usedforsecurity=False)
            with (self.model / name).open("rb", buffering=0) as stream:
                while chunk := stream.read(_READ_BYTES):
                    running.update(chunk)
                    read[name] += len(chunk)
            return running.hexdigest()

        total = sum(manifest["files"][name] for name in missing)
        with (
            report_progress(total, lambda: sum(read.values())),
            ThreadPoolExecutor(_DIGEST_THREADS, "digest") as pool,
        ):
            computed = dict(zip(missing, pool.map(compute, missing), strict=True))
        _write_manifest(self.model, {**manifest, "sha256": {**known, **computed}})

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

    def publish(
        self, partial: Path, source: str, version: str, names: Sequence[str], digests: Mapping[str, str]
    ) -> Path:
        """Make ``partial``'s files the model, by one rename; a damaged model that is in its place is removed.

        ``digests``: SHA-256 of the files for which the source gave them.
        """
        files = partial / "files"
        sizes = {name: (files / name).stat().st_size for name in names}
        known = {name: digests[name] for name in names if name in digests}
        _write_manifest(files, {"source": source, "version": version, "files": sizes, "sha256": known})
        if self.model.exists():
            shutil.rmtree(self.model)
        files.rename(self.model)
        for directory in (self.model, self.root):
            _sync_directory(directory)
        shutil.rmtree(partial, ignore_errors=True)
        return self.model

    def _read_manifest(self) -> dict[str, Any] | None:
        """Return the manifest of the model; None without one, or if a file does not have its size."""
        try:
            manifest: dict[str, Any] = json.loads((self.model / MANIFEST).read_text())
            files = manifest["files"].items()
            complete = all((self.model / name).stat().st_size == size for name, size in files)
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return manifest if complete else None


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    temporary = directory / f"{MANIFEST}.tmp"
    with temporary.open("w") as stream:
        json.dump(manifest, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(directory / MANIFEST)


def _sync_directory(path: Path) -> None:
    """Write the names of a directory to the disk, where the file system supports that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
