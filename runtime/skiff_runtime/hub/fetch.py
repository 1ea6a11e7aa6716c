"""Download of an ``hf://`` model into the hub's cache, verified, as a directory that can be served."""

import errno
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Final, Protocol

from skiff_runtime import log
from skiff_runtime.contract import FLAG_DOWNLOAD_DIR
from skiff_runtime.errors import FetchError
from skiff_runtime.hub.file_lock import exclusive_lock
from skiff_runtime.hub.hub_reference import HubReference
from skiff_runtime.hub.model_cache import ModelCache
from skiff_runtime.hub.repository import CONFIG, GENERATION_CONFIG, RemoteFile, RepositoryListing
from skiff_runtime.transfer import parallel_download
from skiff_runtime.transfer.download_progress import report_progress
from skiff_runtime.transfer.range_source import RangeSource, RangesUnsupported, RemoteObject

PARALLEL_FILES: Final = 4
CHECKSUM_ATTEMPTS: Final = 2
"""A first mismatch may come from a file that an earlier process left; the second download is complete."""


class Source(Protocol):
    """A source of a model's files: the hub, or peers. ``stop`` ends its downloads."""

    stop: threading.Event

    def list_files(self) -> RepositoryListing:
        """Return the files at the reference's revision. Raises ``FetchError``."""

    def download(self, commit: str, name: str, cache_dir: Path) -> Path:
        """Return the file's path in the cache, after downloading it if it is missing. Raises ``FetchError``."""

    def find_ranges(self, commit: str, files: Sequence[RemoteFile]) -> RangeSource | None:
        """Return a source of the files' ranges; None if ``download`` is the better way. Raises ``FetchError``."""


@dataclass(frozen=True, slots=True)
class Peers:
    """Addresses of other nodes' fetchers, in the order of preference, and the token that all of them share."""

    urls: tuple[str, ...]
    token: str = field(repr=False)


def choose_hub_cache(download_dir: str | None) -> Path:
    """Return the directory of downloads: ``--download-dir``, else the cache that the hub's tools share."""
    return Path(download_dir) if download_dir else default_hub_cache()


def default_hub_cache() -> Path:
    """Return the cache directory that the hub's tools share: HF_HUB_CACHE, else ``hub`` in HF_HOME or ~/.cache/huggingface."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def fetch(
    reference: HubReference,
    cache_dir: Path,
    *,
    endpoint: str | None = None,
    peers: Peers | None = None,
    adapter_only: bool = False,
) -> Path:
    """Fetch a model into ``cache_dir`` (layout: ``model_cache.py``), verify it, and return its directory or GGUF file.

    A snapshot with a marker is returned without network. Otherwise the revision is resolved to a commit once, and the
    files that serving needs are downloaded; files that other tools have downloaded are only verified. If the hub cannot
    be reached, a complete snapshot in the cache is verified and served. ``peers`` come before the hub; they must have the
    model. Only one process downloads a model at a time; the others wait for it and use its result. Raises ``FetchError``;
    complete files are kept. With ``adapter_only``, raises ``ConfigError`` before the download of what is not a LoRA
    adapter, unless the cache or peers have it.
    """
    cache = ModelCache(cache_dir, reference)
    with disk_errors(cache_dir):
        if (found := cache.find_verified()) is not None:
            return found
        try:
            cache.prepare()
        except OSError:
            # A read-only cache: its snapshot is served without a marker if it verifies.
            if (cached := _verify_cached(cache, reference)) is None:
                raise
            return cache.locate_model(cached[0], [file.name for file in cached[1]])
        with exclusive_lock(cache.lock_path):
            # Another process may have downloaded it while this one waited for the lock.
            if (found := cache.find_verified()) is not None:
                return found
            cache.remove_stale_downloads()
            if peers is not None and (received := _fetch_from_peers(cache, reference, peers)) is not None:
                return received
            path = _fetch_locked(cache, reference, endpoint, adapter_only=adapter_only)
            cache.remove_peer_partials()
            return path


def fetch_config(reference: HubReference, cache_dir: Path, temporary: Path) -> Path:
    """Return a directory with at least the model's config.json and generation_config.json.

    It is the snapshot in ``cache_dir`` if that is complete; else these two files are downloaded into ``temporary``. A
    GGUF model must be complete in ``cache_dir``; its file is returned.
    """
    with disk_errors(cache_dir):
        if (found := ModelCache(cache_dir, reference).find_verified()) is not None:
            return found
    with disk_errors(temporary):
        from skiff_runtime.hub.hub_client import HubClient

        client = HubClient(reference)
        with client.bounded_retry_after():
            listing = client.list_files()
            if listing.is_gguf:
                raise FetchError(
                    f"{reference} is a GGUF model, whose configuration is inside of its file; download it first "
                    "(skiff fetch)"
                )
            for file in listing.config_files():
                if file.name in (CONFIG, GENERATION_CONFIG):
                    client.download(listing.commit, file.name, temporary)
    return ModelCache(temporary, reference).snapshot(listing.commit)


def _fetch_from_peers(cache: ModelCache, reference: HubReference, peers: Peers) -> Path | None:
    """Return the model that peers have sent; None if they could not, which is logged."""
    if not peers.urls:
        return None
    from skiff_runtime.hub.peer_client import PeerClient

    client = PeerClient(reference, cache, list(peers.urls), peers.token)
    try:
        listing = client.list_files()
        log.event("fetch_started", model=reference, commit=listing.commit, cache=cache.root, source="peers")
        return _fetch_listing(cache, client, listing, reference)
    except FetchError as error:
        log.warning("fetch_fell_back_to_source", model=reference, reason=str(error))
        return None
    finally:
        client.close()


def _fetch_locked(
    cache: ModelCache, reference: HubReference, endpoint: str | None, *, adapter_only: bool
) -> Path:
    # Imported only for a download: a complete model needs neither the client nor its libraries.
    from skiff_runtime.hub.hub_client import HubClient, HubUnavailable

    client = HubClient(reference, endpoint)
    with client.bounded_retry_after():
        try:
            listing = client.list_files()
        except HubUnavailable as error:
            cached = _verify_cached(cache, reference)
            if cached is None:
                raise
            log.warning("fetch_fell_back_to_cache", model=reference, commit=cached[0], reason=str(error))
            return cache.mark_verified(*cached)
        if adapter_only:
            listing.require_adapter(str(reference))
        log.event("fetch_started", model=reference, commit=listing.commit, cache=cache.root)
        return _fetch_listing(cache, client, listing, reference)


def _fetch_listing(
    cache: ModelCache, source: Source, listing: RepositoryListing, reference: HubReference
) -> Path:
    files = _download(cache, source, listing, reference.quant_type)
    path = cache.mark_verified(listing.commit, files)
    total = sum(file.size_bytes for file in files)
    log.event("fetch_finished", model=reference, files=len(files), bytes=total, path=path)
    return path


def _download(
    cache: ModelCache, source: Source, listing: RepositoryListing, quant_type: str
) -> list[RemoteFile]:
    config_files = listing.config_files()
    _download_all(cache, source, listing.commit, config_files)
    weights = listing.weight_files(cache.snapshot(listing.commit), quant_type)
    verified = _download_ranges(cache, source, listing.commit, weights)
    if others := [file for file in weights if file not in verified]:
        _download_all(cache, source, listing.commit, others)
    cache.remove_partials()
    return config_files + weights


def _download_ranges(
    cache: ModelCache, source: Source, commit: str, files: Sequence[RemoteFile]
) -> list[RemoteFile]:
    """Download large files in parallel ranges where the source has them, and return the files that are verified so.

    Files of one chunk, without a SHA-256, or already in the cache are left to ``_download_all``.
    """
    large = [
        file
        for file in files
        if file.has_sha256
        and file.size_bytes > parallel_download.CHUNK_BYTES
        and not cache.has_file(commit, file)
    ]
    ranges = source.find_ranges(commit, large) if large else None
    if ranges is None:
        return []
    partial = cache.open_partial(commit)
    target, scratch = partial / "files", partial / "parts"
    cache.check_space(large, present_bytes=parallel_download.allocated_bytes(partial))
    remotes = [RemoteObject(file.name, file.name, file.size_bytes, f"sha256:{file.digest}") for file in large]
    try:
        parallel_download.download_all(ranges, remotes, target, scratch)
    except RangesUnsupported as error:
        log.warning("fetch_without_ranges", reason=str(error))
    except BaseException:
        source.stop.set()
        raise
    received = [file for file in large if (target / file.name).is_file()]
    for file in received:
        cache.store_blob(target / file.name, file.digest)
        cache.link_blob(commit, file.name, file.digest)
    return received


def _download_all(cache: ModelCache, source: Source, commit: str, files: Sequence[RemoteFile]) -> None:
    """Download and verify every file with several threads. The first failure stops all; complete files are kept.

    The threads are daemons, and nothing waits for them after a failure: a download of the library cannot be interrupted.
    """
    missing = [file for file in files if not cache.has_file(commit, file)]
    cache.check_space(missing)
    pending, outcomes = deque(files), SimpleQueue[BaseException | None]()

    def work() -> None:
        while not source.stop.is_set():
            try:
                file = pending.popleft()
            except IndexError:
                return
            try:
                _download_file(cache, source, commit, file)
            except BaseException as failure:  # noqa: BLE001 (raised again in the thread that waits)
                outcomes.put(failure)
            else:
                outcomes.put(None)

    def received() -> int:
        complete = sum(file.size_bytes for file in files if cache.has_file(commit, file))
        return complete + cache.incomplete_bytes()

    with report_progress(sum(file.size_bytes for file in files), received):
        for _ in range(min(PARALLEL_FILES, len(files))):
            threading.Thread(target=work, name="fetch", daemon=True).start()
        try:
            for _ in files:
                failure = outcomes.get()
                if failure is not None:
                    raise failure
        except BaseException:
            source.stop.set()
            raise


def _download_file(cache: ModelCache, source: Source, commit: str, file: RemoteFile) -> None:
    for attempt in range(1, CHECKSUM_ATTEMPTS + 1):
        if file.is_intact(source.download(commit, file.name, cache.directory)):
            return
        log.warning("fetch_checksum_mismatch", file=file.name, attempt=attempt)
        cache.remove(commit, file.name)
    raise FetchError(
        f"{file.name}: checksum mismatch after {CHECKSUM_ATTEMPTS} downloads (the expected digest is {file.digest}); "
        "check for a proxy that changes the file"
    )


def _verify_cached(cache: ModelCache, reference: HubReference) -> tuple[str, list[RemoteFile]] | None:
    """Return the commit and the files of the snapshot in the cache if it is complete and intact."""
    listing = cache.list_unverified()
    if listing is None:
        return None
    try:
        snapshot = cache.snapshot(listing.commit)
        files = listing.config_files() + listing.weight_files(snapshot, reference.quant_type)
    except FetchError as error:
        log.warning("fetch_cache_incomplete", path=cache.snapshot(listing.commit), reason=str(error))
        return None
    for file in files:
        if not file.is_intact(cache.snapshot(listing.commit) / file.name):
            log.warning("fetch_cache_damaged", path=cache.snapshot(listing.commit) / file.name)
            return None
    return listing.commit, files


@contextmanager
def disk_errors(cache_dir: Path) -> Iterator[None]:
    """Turn an ``OSError`` of the disk into a ``FetchError`` that names the remedy."""
    try:
        yield
    except OSError as error:
        path = error.filename or cache_dir
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(
                f"no space left in {cache_dir} ({error.strerror}); use a larger volume"
            ) from error
        raise FetchError(
            f"cannot use {path} ({error.strerror}); make {cache_dir} writable for user {os.getuid()}, "
            f"or use another {FLAG_DOWNLOAD_DIR}"
        ) from error
