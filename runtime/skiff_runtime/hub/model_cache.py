"""One model in the hub's cache, which other tools share, and Skiff's marks beside it.

::

    CACHE/models--ORG--NAME/
      blobs/DIGEST                huggingface_hub's: contents, by their checksum
      snapshots/COMMIT/           huggingface_hub's: links to them; the model directory that is served
      refs/REVISION               the commit that this revision meant when it was fetched
      .skiff/lock                 held (flock) by the one process that downloads
      .skiff/COMMIT.json          written last, after verification: names and sizes of all files

A snapshot without Skiff's mark is never served unverified. Readers of a marked one take no lock and write nothing,
so a finished cache may be mounted read-only and needs no network.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from skiff_runtime.errors import FetchError
from skiff_runtime.hub.file_lock import is_unlocked
from skiff_runtime.hub.hub_reference import HubReference, is_commit
from skiff_runtime.hub.repository import RemoteFile, RepositoryListing

SPARE_BYTES: Final = 64 << 20
"""Kept free beside what is downloaded, for whatever else lives on the volume."""
_SETTLED_SECONDS: Final = 60.0
_BLOCK_BYTES: Final = 512
_DIGEST_LENGTHS: Final = (40, 64)


class ModelCache:
    """The part of a cache directory that belongs to one model."""

    def __init__(self, cache_dir: Path, reference: HubReference) -> None:
        self.directory = cache_dir
        self._reference = reference
        self.root = cache_dir / f"models--{reference.organisation}--{reference.name}"
        self.marks = self.root / ".skiff"
        self.lock = self.marks / "lock"

    def snapshot(self, commit: str) -> Path:
        """Return the directory of one commit's files."""
        return self.root / "snapshots" / commit

    def prepare(self) -> None:
        """Make the directory of the marks; OSError where nothing can be written into it."""
        self.marks.mkdir(parents=True, exist_ok=True)
        if not os.access(self.marks, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.marks))

    def find(self) -> Path | None:
        """Return the marked snapshot of the reference's revision, if all of it is there."""
        commit = self._commit()
        return self.snapshot(commit) if commit is not None and self._is_marked(commit) else None

    def list_unverified(self) -> RepositoryListing | None:
        """List what the cache holds of the revision, by whomever it was downloaded; digests are the blobs' names."""
        commit = self._commit()
        if commit is None or not self.snapshot(commit).is_dir():
            return None
        paths = sorted(path for path in self.snapshot(commit).iterdir() if path.is_file())
        return RepositoryListing(
            commit, [RemoteFile(path.name, path.stat().st_size, _digest_of(path)) for path in paths]
        )

    def mark(self, commit: str, files: Sequence[RemoteFile]) -> Path:
        """Declare a snapshot complete and verified, and point the revision at it."""
        sizes = {file.name: file.size_bytes for file in files}
        _replace_text(self.marks / f"{commit}.json", json.dumps({"commit": commit, "files": sizes}, indent=1))
        if self._reference.revision != commit:
            self._ref_path().parent.mkdir(parents=True, exist_ok=True)
            _replace_text(self._ref_path(), commit)
        return self.snapshot(commit)

    def holds(self, commit: str, file: RemoteFile) -> bool:
        """Return whether the cache has the file, be it of another commit."""
        return (self.snapshot(commit) / file.name).exists() or bool(
            file.digest and (self.root / "blobs" / file.digest).exists()
        )

    def check_space(self, missing: Sequence[RemoteFile]) -> None:
        """Raise FetchError, with both numbers, where the volume cannot hold ``missing`` as well."""
        needed_bytes = sum(file.size_bytes for file in missing) + SPARE_BYTES
        free_bytes = shutil.disk_usage(self.marks).free
        if missing and needed_bytes > free_bytes:
            raise FetchError(
                f"no space in {self.root}: {needed_bytes / 1e9:.2f} GB are needed, "
                f"{free_bytes / 1e9:.2f} GB are free; use a larger volume, or another --download-dir"
            )

    def remove(self, commit: str, name: str) -> None:
        """Forget a file whose content is wrong."""
        path = self.snapshot(commit) / name
        blob = path.resolve()
        path.unlink(missing_ok=True)
        if blob.is_relative_to(self.directory.resolve()):
            blob.unlink(missing_ok=True)

    def received_bytes(self) -> int:
        """Return how much of files that are being downloaded is on the disk."""
        return sum(state.st_blocks * _BLOCK_BYTES for _, state in self._incomplete())

    def remove_stale_downloads(self) -> None:
        """Remove what processes left that were killed while they downloaded; huggingface_hub never does.

        A process that downloads a file holds its lock, so a free lock means that no process does.
        """
        for path, state in self._incomplete():
            lock = self.directory / ".locks" / self.root.name / f"{path.name.partition('.')[0]}.lock"
            if time.time() - state.st_mtime > _SETTLED_SECONDS and is_unlocked(lock):
                path.unlink(missing_ok=True)

    def _incomplete(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in (self.root / "blobs").glob("*.incomplete"):
            with suppress(FileNotFoundError):  # it has become whole meanwhile
                yield path, path.stat()

    def _commit(self) -> str | None:
        revision = self._reference.revision
        if is_commit(revision):
            return revision
        try:
            commit = self._ref_path().read_text().strip()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None
        return commit if is_commit(commit) else None

    def _ref_path(self) -> Path:
        return self.root / "refs" / self._reference.revision

    def _is_marked(self, commit: str) -> bool:
        snapshot = self.snapshot(commit)
        try:
            files = json.loads((self.marks / f"{commit}.json").read_text())["files"]
            return all((snapshot / name).stat().st_size == size for name, size in files.items())
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
            return False


def _digest_of(path: Path) -> str:
    """Return the checksum that a link of the hub's cache names; empty where a file system has no links."""
    name = path.readlink().name if path.is_symlink() else ""
    return name if len(name) in _DIGEST_LENGTHS and set(name) <= set("0123456789abcdef") else ""


def _replace_text(path: Path, text: str) -> None:
    """Write a file so that it appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
