"""Parallel download: several byte ranges of several files at once, written in place, resumed and verified.

A file is divided into chunks of ``CHUNK_BYTES``. Each of ``STREAMS`` threads takes the next missing chunk, of whichever
file, and writes the pieces where they belong as they arrive, so memory holds a piece for each stream. A journal beside
the file contains a CRC of each complete chunk: after an interruption, chunks that still match it are kept, whether the
process, the node or the disk's cache was lost. The checksum needs the bytes in order: whichever thread completes a chunk
carries the hash forward over the chunks that are complete from the start of the file, which it reads from the page
cache, while the others go on receiving.
"""

import contextlib
import hashlib
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from skiff_runtime import log
from skiff_runtime.errors import FetchError
from skiff_runtime.transfer.download_progress import report_progress
from skiff_runtime.transfer.range_source import RangeSource, RemoteObject, TransientSourceError
from skiff_runtime.transfer.retries import Retries

CHUNK_BYTES: Final = 8 << 20
STREAMS: Final = 8
CHECKSUM_ATTEMPTS: Final = 2
_OPEN_FILES: Final = 128
"""Files that are open at a time, each with its journal; a process may have 1,024 descriptors by default."""
_READ_BYTES: Final = 1 << 20
_PROGRESS_BYTES: Final = 64 << 10
"""An attempt that received this much has progressed: a slow or lossy connection is not given up."""
_BLOCK_BYTES: Final = 512
"""The unit of ``st_blocks``."""
_ENTRY: Final = struct.Struct("<Q")
_COMPLETE: Final = 1 << 32
"""Set in the journal's entry of a complete chunk, beside its CRC-32."""


def download_all(source: RangeSource, files: Sequence[RemoteObject], target: Path, scratch: Path) -> None:
    """Download ``files`` into ``target``; files that are there are complete. ``scratch`` keeps partial files for a resumption.

    The first failure stops all. The threads are daemons, and nothing waits for them after a failure: a read of a library
    cannot be interrupted.
    """
    scratch.mkdir(parents=True, exist_ok=True)
    missing = [each for each in files if not (target / each.name).is_file()]
    if not missing:
        return
    received = 0
    transfer: _Transfer | None = None

    def received_bytes() -> int:
        return received + (transfer.received_bytes() if transfer else 0)

    with report_progress(sum(each.size_bytes for each in missing), received_bytes, on_terminal=True):
        for first in range(0, len(missing), _OPEN_FILES):
            batch = missing[first : first + _OPEN_FILES]
            transfer = _Transfer(source, [_PartialFile(each, target, scratch) for each in batch])
            transfer.run()
            received, transfer = received + sum(each.size_bytes for each in batch), None


def allocated_bytes(directory: Path) -> int:
    """Return the bytes on the disk of the files below ``directory``: a partial file has holes where chunks are missing."""
    return sum(path.stat().st_blocks * _BLOCK_BYTES for path in directory.rglob("*") if path.is_file())


class _PartialFile:
    """One file that is being written, with its journal and its running checksum."""

    def __init__(self, remote: RemoteObject, target: Path, scratch: Path) -> None:
        name = hashlib.sha256(remote.name.encode()).hexdigest()[:16]
        self.remote = remote
        self.path = target / remote.name
        self._part, self._journal_path = scratch / f"{name}.part", scratch / f"{name}.journal"
        self.chunks = max(1, -(-remote.size_bytes // CHUNK_BYTES))
        self._data = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._journal = os.open(self._journal_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.ftruncate(self._data, remote.size_bytes)
        os.ftruncate(self._journal, self.chunks * _ENTRY.size)
        self._lock, self._hash_lock = threading.Lock(), threading.Lock()
        self._complete = [remote.size_bytes == 0 or self._is_kept(index) for index in range(self.chunks)]
        self._hash, self._hashed = remote.new_hash(), 0
        self._is_open = True
        self.attempts = 1

    def missing(self) -> list[int]:
        """Return the chunks that are not complete."""
        return [index for index, complete in enumerate(self._complete) if not complete]

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the first byte of a chunk, and the one after its last."""
        return index * CHUNK_BYTES, min(self.remote.size_bytes, (index + 1) * CHUNK_BYTES)

    def write(self, data: memoryview, position: int) -> None:
        """Write a piece where it belongs."""
        while data:
            written = os.pwrite(self._data, data, position)
            data, position = data[written:], position + written

    def complete(self, index: int, crc: int) -> bool:
        """Mark a chunk as complete, and carry the checksum forward. Return True for the last chunk of the file."""
        os.pwrite(self._journal, _ENTRY.pack(_COMPLETE | crc), index * _ENTRY.size)
        with self._lock:
            self._complete[index] = True
            is_last = all(self._complete)
        if is_last:
            with self._hash_lock:
                self._carry_hash_forward()
        elif self._hash_lock.acquire(blocking=False):
            try:
                self._carry_hash_forward()
            finally:
                self._hash_lock.release()
        return is_last

    def verify(self) -> bool:
        """Return whether the checksum of a complete file is the expected one."""
        with self._hash_lock:
            self._carry_hash_forward()
        return self.remote.matches(self._hash)

    def start_over(self) -> None:
        """Forget every chunk."""
        os.ftruncate(self._journal, 0)
        os.ftruncate(self._journal, self.chunks * _ENTRY.size)
        self._complete = [False] * self.chunks
        self._hash, self._hashed = self.remote.new_hash(), 0

    def sync(self) -> None:
        """Wait until the content is on the disk: a name never precedes its bytes."""
        os.fdatasync(self._data)

    def publish(self) -> None:
        """Move the complete file, whose content is on the disk, to its path."""
        self.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._part.replace(self.path)
        self._journal_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the files, unless that was done; they stay for a resumption."""
        if self._is_open:
            self._is_open = False
            os.close(self._data)
            os.close(self._journal)

    def discard(self) -> None:
        """Remove what was received: its content is wrong."""
        self.close()
        self._part.unlink(missing_ok=True)
        self._journal_path.unlink(missing_ok=True)

    def _is_kept(self, index: int) -> bool:
        (entry,) = _ENTRY.unpack(os.pread(self._journal, _ENTRY.size, index * _ENTRY.size))
        if not entry & _COMPLETE:
            return False
        crc = 0
        for piece in self._read(index):
            crc = zlib.crc32(piece, crc)
        return bool(entry == _COMPLETE | crc)

    def _read(self, index: int) -> Iterator[bytes]:
        start, stop = self.bounds(index)
        for position in range(start, stop, _READ_BYTES):
            yield os.pread(self._data, min(_READ_BYTES, stop - position), position)

    def _carry_hash_forward(self) -> None:
        if self._hash is None:
            return
        while self._hashed < self.chunks and self._complete[self._hashed]:
            for piece in self._read(self._hashed):
                self._hash.update(piece)
            self._hashed += 1


class _Transfer:
    """The transfer of some files by threads."""

    def __init__(self, source: RangeSource, files: Sequence[_PartialFile]) -> None:
        self._source = source
        self._files = files
        self._stop = threading.Event()
        self._publish_lock = threading.Lock()
        """Held to publish a file and to stop: nothing is published once ``run`` has ended."""
        self._users = 1
        """``run`` and the threads that have not ended; the last one closes the files."""
        self._users_lock = threading.Lock()
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        self._spans: deque[tuple[_PartialFile, int, int]] = deque()
        self._received = 0
        self._received_lock = threading.Lock()
        total = 0
        for file in files:
            total += file.remote.size_bytes
            self._queue(file)
        self._received = total - sum(stop - start for _, start, stop in self._spans)

    def received_bytes(self) -> int:
        """Count the bytes that have arrived, those of earlier attempts included."""
        return self._received

    def run(self) -> None:
        """Transfer all files, and raise the first failure."""
        try:
            for file in self._files:
                if not file.missing():
                    self._finish(file)
            for _ in range(min(STREAMS, len(self._spans))):
                with self._users_lock:
                    self._users += 1
                threading.Thread(target=self._work, name="fetch", daemon=True).start()
            for _ in self._files:
                failure = self._outcomes.get()
                if failure is not None:
                    raise failure
        finally:
            with self._publish_lock:
                self._stop.set()
            self._leave()

    def _leave(self) -> None:
        with self._users_lock:
            self._users -= 1
            is_last = self._users == 0
        if is_last:
            for file in self._files:
                file.close()

    def _queue(self, file: _PartialFile) -> None:
        missing = file.missing()
        if missing and not self._source.supports_ranges(file.remote):
            # The one stream brings every chunk again, and each may be completed once only.
            file.start_over()
            self._spans.append((file, 0, file.remote.size_bytes))
            return
        self._spans.extend((file, *file.bounds(index)) for index in missing)

    def _work(self) -> None:
        try:
            while not self._stop.is_set():
                try:
                    span = self._spans.popleft()
                except IndexError:
                    return
                self._transfer(*span)
        except BaseException as failure:  # noqa: BLE001 (raised again in the thread that waits)
            self._outcomes.put(failure)
        finally:
            self._leave()

    def _transfer(self, file: _PartialFile, start: int, stop: int) -> None:
        """Receive one span, which begins and ends with a chunk. A broken stream goes on where it ended."""
        retries = Retries(file.remote.name, self._stop)
        position, crc = start, 0
        while position < stop:
            begin = position
            # Without ranges a stream begins with the file, and brings again what is written already.
            at = position if start or self._source.supports_ranges(file.remote) else 0
            try:
                for piece in self._source.stream(file.remote, at, stop):
                    self._check_stop(file)
                    data = memoryview(piece).cast("B")
                    if at < position:
                        skipped = min(len(data), position - at)
                        data, at = data[skipped:], at + skipped
                    if len(data) > stop - position:
                        raise TransientSourceError("the source sent more bytes than it announced")
                    while data:
                        boundary = min(stop, (position // CHUNK_BYTES + 1) * CHUNK_BYTES)
                        part = data[: boundary - position]
                        file.write(part, position)
                        crc = zlib.crc32(part, crc)
                        position, at, data = position + len(part), at + len(part), data[len(part) :]
                        with self._received_lock:
                            self._received += len(part)
                        if position == boundary:
                            if file.complete((position - 1) // CHUNK_BYTES, crc):
                                self._finish(file)
                            crc = 0
                if position < stop:
                    raise TransientSourceError("the connection ended early")
            except TransientSourceError as error:
                if position - begin >= _PROGRESS_BYTES:
                    retries.reset()
                retries.wait(error)

    def _check_stop(self, file: _PartialFile) -> None:
        if self._stop.is_set():
            raise FetchError(f"{file.remote.name}: stopped")

    def _finish(self, file: _PartialFile) -> None:
        if file.verify():
            file.sync()
            with self._publish_lock:
                self._check_stop(file)
                file.publish()
            self._outcomes.put(None)
            return
        log.warning("fetch_checksum_mismatch", file=file.remote.name, attempt=file.attempts)
        if file.attempts >= CHECKSUM_ATTEMPTS:
            with contextlib.suppress(OSError):
                file.discard()
            raise FetchError(
                f"{file.remote.name}: checksum mismatch after {CHECKSUM_ATTEMPTS} downloads (the expected digest is "
                f"{file.remote.digest}); check for a proxy that changes the file, or upload it again"
            )
        file.attempts += 1
        file.start_over()
        with self._received_lock:
            self._received -= file.remote.size_bytes
        self._queue(file)
