"""Getting many files of one commit: a few at a time, each resumed, retried and checked."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Final

from skiff_runtime import log
from skiff_runtime.errors import FetchError
from skiff_runtime.hub.cache import ModelCache
from skiff_runtime.hub.client import HubClient
from skiff_runtime.hub.listing import RemoteFile
from skiff_runtime.hub.partial import PartialFile
from skiff_runtime.hub.progress import Progress
from skiff_runtime.hub.retry import RetryPolicy, Transient

PARALLEL_FILES: Final = 4
CHECKSUM_ATTEMPTS: Final = 2
"""A first mismatch may come from what an earlier process left; a second one does not."""

_TICK_SECONDS: Final = 0.5


class Transfer:
    """Downloads into one snapshot of the cache."""

    def __init__(
        self, client: HubClient, cache: ModelCache, commit: str, *, retry: RetryPolicy, progress: Progress
    ) -> None:
        self._client = client
        self._cache = cache
        self._commit = commit
        self._retry = retry
        self._progress = progress
        self._stop = threading.Event()

    def run(self, files: Sequence[RemoteFile]) -> None:
        """Have every file in the snapshot; the first FetchError ends all, keeping what was received."""
        missing = [file for file in files if not self._is_here(file)]
        self._cache.check_space(sum(map(self._missing_bytes, missing)))
        self._progress.begin(missing)
        with ThreadPoolExecutor(PARALLEL_FILES, thread_name_prefix="fetch") as pool:
            futures = [pool.submit(self._get, file) for file in missing]
            try:
                self._watch(futures)
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _watch(self, futures: "list[Future[None]]") -> None:
        """Return when all have ended; raise what the first that failed raised."""
        unfinished = futures
        while unfinished:
            wait(unfinished, _TICK_SECONDS, FIRST_EXCEPTION)
            self._progress.tick()
            for future in unfinished:
                if future.done():
                    future.result()
            unfinished = [future for future in unfinished if not future.done()]

    def _target(self, file: RemoteFile) -> Path:
        return self._cache.snapshot(self._commit) / file.name

    def _is_here(self, file: RemoteFile) -> bool:
        # A file got its name only after its checksum was found right.
        target = self._target(file)
        return target.is_file() and target.stat().st_size == file.size_bytes

    def _missing_bytes(self, file: RemoteFile) -> int:
        partial = self._cache.partial / file.partial_name
        return file.size_bytes - (partial.stat().st_size if partial.is_file() else 0)

    def _get(self, file: RemoteFile) -> None:
        partial = PartialFile(self._cache.partial, file)
        try:
            for attempt in range(1, CHECKSUM_ATTEMPTS + 1):
                self._retry.run(file.name, self._stop, lambda: self._receive(file, partial))
                if partial.finish(self._target(file)):
                    return
                log.warning("fetch_checksum_mismatch", file=file.name, attempt=attempt)
        finally:
            partial.close()
        raise FetchError(
            f"{file.name}: checksum mismatch after {CHECKSUM_ATTEMPTS} downloads ({file.algorithm} is not {file.digest}); "
            "something between the hub and this machine changes the file"
        )

    def _receive(self, file: RemoteFile, partial: PartialFile) -> None:
        """One attempt to have the whole file, going on from what is here."""
        self._progress.update(file.name, partial.received_bytes)
        if partial.is_whole():
            return
        before = partial.received_bytes
        try:
            with self._client.open_file(self._commit, file.name, before) as (start, chunks):
                if start != before:
                    partial.restart()
                if start not in (0, before):
                    raise Transient(f"{file.name}: asked for byte {before}, the server began at {start}")
                self._take(file, partial, chunks)
        except Transient as failure:
            failure.progressed = partial.received_bytes > before
            raise
        if not partial.is_whole():
            raise Transient(
                f"only {partial.received_bytes} of {file.size_bytes} bytes came", progressed=False
            )

    def _take(self, file: RemoteFile, partial: PartialFile, chunks: Iterator[bytes]) -> None:
        for chunk in chunks:
            partial.append(chunk)
            self._progress.update(file.name, partial.received_bytes)
            if self._stop.is_set():
                raise FetchError(f"{file.name}: stopped; what has come is kept")
