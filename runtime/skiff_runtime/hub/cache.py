"""The cache of downloaded models on disk, safe to share between pods.

::

    CACHE/models--ORG--NAME/
      lock                        held (flock) by the one process that downloads
      refs/REVISION               the commit that this revision meant when it was fetched
      partial/NAME.DIGEST         a file that is being downloaded
      snapshots/COMMIT/           the model directory that is served
      snapshots/COMMIT/.complete  written last: names and sizes of all files

A snapshot without its ``.complete`` is never served. Readers take no lock and write nothing,
so a finished cache may be mounted read-only and needs no network.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Final
from urllib.parse import quote

from skiff_runtime.errors import FetchError
from skiff_runtime.hub.reference import HubReference, is_commit

MARKER: Final = ".complete"
SPARE_BYTES: Final = 64 << 20
"""Kept free beside what is downloaded, for whatever else lives on the volume."""


class ModelCache:
    """The part of a cache directory that belongs to one model."""

    def __init__(self, cache_dir: Path, reference: HubReference) -> None:
        self._reference = reference
        self.root = cache_dir / f"models--{reference.organisation}--{reference.name}"
        self.lock = self.root / "lock"
        self.partial = self.root / "partial"

    def snapshot(self, commit: str) -> Path:
        """The directory of one commit's files."""
        return self.root / "snapshots" / commit

    def find(self) -> Path | None:
        """The complete snapshot of the reference's revision, or None."""
        revision = self._reference.revision
        commit = revision if is_commit(revision) else self._read_ref()
        if commit is None or not self._is_complete(commit):
            return None
        return self.snapshot(commit)

    def prepare(self, commit: str) -> None:
        """Make the directories to download into."""
        self.snapshot(commit).mkdir(parents=True, exist_ok=True)
        self.partial.mkdir(exist_ok=True)

    def complete(self, commit: str, sizes: dict[str, int]) -> Path:
        """Declare a snapshot complete, point the revision at it and drop what is left of other downloads."""
        _replace_text(
            self.snapshot(commit) / MARKER, json.dumps({"commit": commit, "files": sizes}, indent=1)
        )
        if self._reference.revision != commit:
            self._ref_path().parent.mkdir(exist_ok=True)
            _replace_text(self._ref_path(), commit)
        shutil.rmtree(self.partial, ignore_errors=True)
        return self.snapshot(commit)

    def check_space(self, needed_bytes: int) -> None:
        """FetchError, with both numbers, where the volume cannot hold ``needed_bytes`` more."""
        free_bytes = shutil.disk_usage(self.root).free
        if needed_bytes and needed_bytes + SPARE_BYTES > free_bytes:
            raise FetchError(
                f"no space in {self.root}: {(needed_bytes + SPARE_BYTES) / 1e9:.2f} GB are needed, "
                f"{free_bytes / 1e9:.2f} GB are free; use a larger volume, or another --cache-dir"
            )

    def _ref_path(self) -> Path:
        return self.root / "refs" / quote(self._reference.revision, safe="")

    def _read_ref(self) -> str | None:
        try:
            commit = self._ref_path().read_text().strip()
        except FileNotFoundError:
            return None
        return commit if is_commit(commit) else None

    def _is_complete(self, commit: str) -> bool:
        """Whether the marker is there and every file has the size that it names."""
        snapshot = self.snapshot(commit)
        try:
            files = json.loads((snapshot / MARKER).read_text())["files"]
            return all((snapshot / name).stat().st_size == size for name, size in files.items())
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
            return False


def _replace_text(path: Path, text: str) -> None:
    """Write a file so that it appears whole or not at all."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
