"""One model in the hub's cache, which other tools share, and Skiff's markers of verified snapshots.

::

    CACHE/models--ORG--NAME/
      blobs/DIGEST                contents, by their checksum (huggingface_hub)
      blobs/*.peer.incomplete     what a peer has sent of a content so far; continued after a restart
      snapshots/COMMIT/           links to the blobs: the model directory that is served (huggingface_hub)
      refs/REVISION               the commit of this revision when it was fetched (huggingface_hub)
      .skiff/lock                 held (flock) by the process that downloads
      .skiff/COMMIT.json          marker, written last: names and sizes of all verified files
      .skiff/COMMIT.Q4_K_M.json   marker of one GGUF file, chosen by its quantization
      .skiff/partial-COMMIT/      weights that are received in ranges, kept for a resumption

A snapshot without a marker is verified before it is served. Reading a snapshot with a marker takes no lock and writes
nothing, so a complete cache can be mounted read-only and needs no network.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from skiff_runtime.contract import FLAG_DOWNLOAD_DIR
from skiff_runtime.errors import FetchError
from skiff_runtime.gguf.header import is_gguf
from skiff_runtime.hub.file_lock import is_unlocked
from skiff_runtime.hub.hub_reference import HubReference, is_commit
from skiff_runtime.hub.repository import POOLING_CONFIG, RemoteFile, RepositoryListing

SPARE_BYTES: Final = 64 << 20
"""Kept free on the volume beside the download, for its other users."""
PEER_PARTIAL_SUFFIX: Final = ".peer.incomplete"
_PARTIAL: Final = "partial-"
_STALE_SECONDS: Final = 60.0
"""Partial files that were written to more recently are kept, whatever the state of their lock."""
_BLOCK_BYTES: Final = 512
_DIGEST_LENGTHS: Final = (40, 64)


class ModelCache:
    """The part of a cache directory that belongs to one model."""

    def __init__(self, cache_dir: Path, reference: HubReference) -> None:
        self.directory = cache_dir
        self._reference = reference
        self.root = cache_dir / f"models--{reference.organisation}--{reference.name}"
        self.marker_dir = self.root / ".skiff"
        self.lock_path = self.marker_dir / "lock"

    def snapshot(self, commit: str) -> Path:
        """Return the directory of one commit's files."""
        return self.root / "snapshots" / commit

    def prepare(self) -> None:
        """Create the marker directory. Raises ``OSError`` if it is not writable."""
        self.marker_dir.mkdir(parents=True, exist_ok=True)
        if not os.access(self.marker_dir, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self.marker_dir))

    def locate_model(self, commit: str, names: Iterable[str]) -> Path:
        """Return what is served of a snapshot with the files ``names``: its directory, or its GGUF file."""
        path = self.snapshot(commit)
        return next((path / name for name in names if is_gguf(path / name)), path)

    def find_verified(self) -> Path | None:
        """Return the model at the reference's revision if it has a marker and is complete."""
        commit = self._commit()
        names = None if commit is None else self._read_marker(commit)
        return None if commit is None or names is None else self.locate_model(commit, names)

    def list_verified(self) -> RepositoryListing | None:
        """List the files of the marker at the reference's revision; None if there is none or it is not complete."""
        commit = self._commit()
        names = None if commit is None else self._read_marker(commit)
        if commit is None or names is None:
            return None
        paths = {name: self.snapshot(commit) / name for name in names}
        files = [RemoteFile(name, path.stat().st_size, _digest_of(path)) for name, path in paths.items()]
        return RepositoryListing(commit, files)

    def list_unverified(self) -> RepositoryListing | None:
        """List the files of the revision in the cache, whichever tool downloaded them. Digests are the names of the blobs."""
        commit = self._commit()
        if commit is None or not self.snapshot(commit).is_dir():
            return None
        snapshot = self.snapshot(commit)
        paths = sorted(
            path for path in (*snapshot.iterdir(), *snapshot.glob("*/config.json")) if path.is_file()
        )
        files = [
            RemoteFile(str(path.relative_to(snapshot)), path.stat().st_size, _digest_of(path))
            for path in paths
        ]
        return RepositoryListing(
            commit, [each for each in files if "/" not in each.name or POOLING_CONFIG.fullmatch(each.name)]
        )

    def mark_verified(self, commit: str, files: Sequence[RemoteFile]) -> Path:
        """Write the marker of a complete and verified snapshot, and point the revision at it."""
        sizes = {file.name: file.size_bytes for file in files}
        _replace_text(self._marker_path(commit), json.dumps({"commit": commit, "files": sizes}, indent=1))
        if self._reference.revision != commit:
            self._ref_path().parent.mkdir(parents=True, exist_ok=True)
            _replace_text(self._ref_path(), commit)
        return self.locate_model(commit, sizes)

    def has_file(self, commit: str, file: RemoteFile) -> bool:
        """Return whether the cache has the file, even if it belongs to another commit."""
        return (self.snapshot(commit) / file.name).exists() or bool(
            file.digest and (self.root / "blobs" / file.digest).exists()
        )

    def has_blob(self, digest: str) -> bool:
        """Return whether the cache has a file of this digest, even if it belongs to another commit."""
        return self._blob(digest).exists()

    def peer_partial(self, digest: str) -> Path:
        """Return the path at which a file is assembled that a peer sends."""
        self._blob(digest).parent.mkdir(parents=True, exist_ok=True)
        return self._blob(digest + PEER_PARTIAL_SUFFIX)

    def store_blob(self, partial: Path, digest: str) -> None:
        """Make an assembled file a blob. That of a peer is not verified yet, as the files that the hub's client stores."""
        self._blob(digest).parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as stream:
            os.fsync(stream.fileno())
        partial.replace(self._blob(digest))

    def link_blob(self, commit: str, name: str, digest: str) -> Path:
        """Make the blob a file of the snapshot: by a relative link, as the hub's client does."""
        path = self.snapshot(commit) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        temporary.symlink_to(os.path.relpath(self._blob(digest), path.parent))
        temporary.replace(path)
        return path

    def remove_peer_partials(self) -> None:
        """Remove what peers sent of files that came from the source in the end."""
        for path in (self.root / "blobs").glob(f"*{PEER_PARTIAL_SUFFIX}"):
            path.unlink(missing_ok=True)

    def open_partial(self, commit: str) -> Path:
        """Return the directory of the ranges that have arrived of a commit; those of other commits are removed."""
        partial = self.marker_dir / f"{_PARTIAL}{commit}"
        for other in self.marker_dir.glob(f"{_PARTIAL}*"):
            if other != partial:
                shutil.rmtree(other)
        return partial

    def remove_partials(self) -> None:
        """Remove what is left of files that were received in ranges."""
        for path in self.marker_dir.glob(f"{_PARTIAL}*"):
            shutil.rmtree(path, ignore_errors=True)

    def check_space(self, missing: Sequence[RemoteFile], *, present_bytes: int = 0) -> None:
        """Raise ``FetchError``, with both sizes, if the volume has no room for ``missing`` but ``present_bytes``."""
        needed_bytes = sum(file.size_bytes for file in missing) - present_bytes + SPARE_BYTES
        free_bytes = shutil.disk_usage(self.marker_dir).free
        if missing and needed_bytes > free_bytes:
            raise FetchError(
                f"not enough space in {self.root}: {needed_bytes / 1e9:.2f} GB are needed, "
                f"{free_bytes / 1e9:.2f} GB are free; use a larger volume, or another {FLAG_DOWNLOAD_DIR}"
            )

    def remove(self, commit: str, name: str) -> None:
        """Remove a file whose content is wrong, and its blob."""
        path = self.snapshot(commit) / name
        blob = path.resolve()
        path.unlink(missing_ok=True)
        if blob.is_relative_to(self.directory.resolve()):
            blob.unlink(missing_ok=True)

    def incomplete_bytes(self) -> int:
        """Return the bytes on the disk of files that are being downloaded."""
        return sum(state.st_blocks * _BLOCK_BYTES for _, state in self._incomplete_files())

    def remove_stale_downloads(self) -> None:
        """Remove the partial files of processes that were killed during a download; huggingface_hub never does.

        A process that downloads a file holds the file's lock, so a partial file without a held lock is stale. What a
        peer has sent is kept: it is continued.
        """
        for path, state in self._incomplete_files():
            if path.name.endswith(PEER_PARTIAL_SUFFIX):
                continue
            lock = self.directory / ".locks" / self.root.name / f"{path.name.partition('.')[0]}.lock"
            if time.time() - state.st_mtime > _STALE_SECONDS and is_unlocked(lock):
                path.unlink(missing_ok=True)

    def _incomplete_files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in (self.root / "blobs").glob("*.incomplete"):
            with suppress(FileNotFoundError):  # its download has finished in the meantime
                yield path, path.stat()

    def _blob(self, name: str) -> Path:
        return self.root / "blobs" / name

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

    def _marker_path(self, commit: str) -> Path:
        quant_type = self._reference.quant_type
        return self.marker_dir / (f"{commit}.{quant_type}.json" if quant_type else f"{commit}.json")

    def _read_marker(self, commit: str) -> list[str] | None:
        """Return the names in the marker of a snapshot; None without a marker, or if it is not complete."""
        snapshot = self.snapshot(commit)
        try:
            files = json.loads(self._marker_path(commit).read_text())["files"]
            complete = all((snapshot / name).stat().st_size == size for name, size in files.items())
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return list(files) if complete else None


def _digest_of(path: Path) -> str:
    """Return the checksum in the target of a link of the hub's cache; "" on a file system without links."""
    name = path.readlink().name if path.is_symlink() else ""
    return name if len(name) in _DIGEST_LENGTHS and set(name) <= set("0123456789abcdef") else ""


def _replace_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with temporary.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(path)
