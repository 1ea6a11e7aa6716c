"""From an ``hf://`` reference to a directory that can be served."""

import errno
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final

from skiff_runtime import log
from skiff_runtime.errors import FetchError
from skiff_runtime.hub.download_progress import reported
from skiff_runtime.hub.file_lock import exclusive
from skiff_runtime.hub.hub_reference import HubReference, parse_reference
from skiff_runtime.hub.model_cache import ModelCache
from skiff_runtime.hub.repository import CONFIG, GENERATION_CONFIG, RemoteFile, RepositoryListing

if TYPE_CHECKING:
    from skiff_runtime.hub.hub_client import HubClient

PARALLEL_FILES: Final = 4
CHECKSUM_ATTEMPTS: Final = 2
"""A first mismatch may come from what an earlier process left; a second one does not."""


def resolve(uri: str, revision: str | None, cache_dir: Path) -> Path:
    """Return the directory of an ``hf://`` model: from the cache without any network, else fetched now.

    Raises ConfigError for a URI or revision that names nothing, FetchError where it cannot be had.
    """
    return fetch(parse_reference(uri, revision), cache_dir)


def default_hub_cache() -> Path:
    """Return the cache that the hub's tools share: HF_HUB_CACHE, or ``hub`` in HF_HOME or ~/.cache/huggingface."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def fetch(reference: HubReference, cache_dir: Path, *, endpoint: str | None = None) -> Path:
    """Have a model in ``cache_dir`` (layout: ``cache.py``), verified, and return its directory.

    A marked one is returned as it is. Otherwise its revision is resolved to a commit once, and what serving needs is
    downloaded and verified; what other tools have downloaded already is only verified. Where the hub cannot be
    reached, what the cache holds of the revision is served if it is whole. Only one process downloads a model at a
    time; the others wait and find it done. FetchError says what to change; files that are whole are kept.
    """
    cache = ModelCache(cache_dir, reference)
    with _disk_errors(cache_dir):
        if (found := cache.find()) is not None:
            return found
        try:
            cache.prepare()
        except OSError:
            if (held := _verify_cached(cache)) is None:
                raise
            return cache.snapshot(held[0])
        with exclusive(cache.lock):
            if (found := cache.find()) is not None:
                return found
            cache.remove_stale_downloads()
            return _obtain(cache, reference, endpoint)


def fetch_config(reference: HubReference, cache_dir: Path, temporary: Path) -> Path:
    """Return a directory with the model's config.json and generation_config.json, and perhaps no more.

    The one in ``cache_dir`` where it is complete; else only these two files are downloaded, into ``temporary``.
    """
    with _disk_errors(cache_dir):
        if (found := ModelCache(cache_dir, reference).find()) is not None:
            return found
    with _disk_errors(temporary):
        from skiff_runtime.hub.hub_client import HubClient

        client = HubClient(reference)
        with client.bounded_retry_after():
            listing = client.listing()
            for file in listing.descriptions():
                if file.name in (CONFIG, GENERATION_CONFIG):
                    client.bring(listing.commit, file.name, temporary)
    return ModelCache(temporary, reference).snapshot(listing.commit)


def _obtain(cache: ModelCache, reference: HubReference, endpoint: str | None) -> Path:
    # Imported where a download is due: a model that is there needs nothing of it.
    from skiff_runtime.hub.hub_client import HubClient, HubUnavailable

    client = HubClient(reference, endpoint)
    with client.bounded_retry_after():
        try:
            listing = client.listing()
        except HubUnavailable as error:
            held = _verify_cached(cache)
            if held is None:
                raise
            log.warning("fetch_fell_back_to_cache", model=reference, commit=held[0], reason=str(error))
            return cache.mark(*held)
        log.event("fetch_started", model=reference, commit=listing.commit, cache=cache.root)
        files = _download(cache, client, listing)
    path = cache.mark(listing.commit, files)
    total = sum(file.size_bytes for file in files)
    log.event("fetch_finished", model=reference, files=len(files), bytes=total, path=path)
    return path


def _download(cache: ModelCache, client: "HubClient", listing: RepositoryListing) -> list[RemoteFile]:
    descriptions = listing.descriptions()
    _bring_all(cache, client, listing.commit, descriptions)
    weights = listing.weights(cache.snapshot(listing.commit))
    _bring_all(cache, client, listing.commit, weights)
    return descriptions + weights


def _bring_all(cache: ModelCache, client: "HubClient", commit: str, files: Sequence[RemoteFile]) -> None:
    """Have every file in the snapshot, verified; the first failure ends all and keeps what is whole.

    The threads do not outlive the process, and nothing waits for them: the library cannot be interrupted.
    """
    missing = [file for file in files if not cache.holds(commit, file)]
    cache.check_space(missing)
    waiting, outcomes = deque(files), SimpleQueue[BaseException | None]()

    def work() -> None:
        while waiting and not client.stop.is_set():
            try:
                _bring(cache, client, commit, waiting.popleft())
            except BaseException as failure:  # noqa: BLE001 (raised again by the thread that waits for it)
                outcomes.put(failure)
            else:
                outcomes.put(None)

    def received() -> int:
        whole = sum(file.size_bytes for file in files if cache.holds(commit, file))
        return whole + cache.received_bytes()

    with reported(sum(file.size_bytes for file in files), received):
        for _ in range(min(PARALLEL_FILES, len(files))):
            threading.Thread(target=work, name="fetch", daemon=True).start()
        try:
            for _ in files:
                failure = outcomes.get()
                if failure is not None:
                    raise failure
        except BaseException:
            client.stop.set()
            raise


def _bring(cache: ModelCache, client: "HubClient", commit: str, file: RemoteFile) -> None:
    for attempt in range(1, CHECKSUM_ATTEMPTS + 1):
        if file.is_intact(client.bring(commit, file.name, cache.directory)):
            return
        log.warning("fetch_checksum_mismatch", file=file.name, attempt=attempt)
        cache.remove(commit, file.name)
    raise FetchError(
        f"{file.name}: checksum mismatch after {CHECKSUM_ATTEMPTS} downloads (its digest is not {file.digest}); "
        "something between the hub and this machine changes the file"
    )


def _verify_cached(cache: ModelCache) -> tuple[str, list[RemoteFile]] | None:
    """Return the commit and the files that the cache holds of the revision, if they are whole and intact."""
    listing = cache.list_unverified()
    if listing is None:
        return None
    try:
        files = listing.descriptions() + listing.weights(cache.snapshot(listing.commit))
    except FetchError as error:
        log.warning("fetch_cache_incomplete", path=cache.snapshot(listing.commit), reason=str(error))
        return None
    for file in files:
        if not file.is_intact(cache.snapshot(listing.commit) / file.name):
            log.warning("fetch_cache_damaged", path=cache.snapshot(listing.commit) / file.name)
            return None
    return listing.commit, files


@contextmanager
def _disk_errors(cache_dir: Path) -> Iterator[None]:
    """Turn what the disk says into a FetchError that says what to change."""
    try:
        yield
    except OSError as error:
        where = error.filename or cache_dir
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FetchError(
                f"no space left in {cache_dir} ({error.strerror}); use a larger volume"
            ) from error
        raise FetchError(
            f"cannot use {where} ({error.strerror}); make {cache_dir} writable for user {os.getuid()}, "
            "or use another --download-dir"
        ) from error
