"""From an ``hf://`` reference to a directory that can be served."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from skiff_runtime import log
from skiff_runtime.errors import FetchError
from skiff_runtime.hub.cache import ModelCache
from skiff_runtime.hub.client import HubAccess, HubClient, access_from
from skiff_runtime.hub.listing import CONFIG, GENERATION_CONFIG, INDEX, Listing, parse_listing
from skiff_runtime.hub.lock import exclusive
from skiff_runtime.hub.progress import Progress, choose_progress
from skiff_runtime.hub.reference import HubReference, parse_reference
from skiff_runtime.hub.retry import RetryPolicy
from skiff_runtime.hub.transfer import Transfer


def resolve(uri: str, revision: str | None, cache_dir: Path) -> Path:
    """The directory of an ``hf://`` model: from the cache without any network, else fetched now.

    Raises ConfigError for a URI or revision that names nothing, FetchError where it cannot be had.
    """
    return fetch(parse_reference(uri, revision), cache_dir)


def fetch(
    reference: HubReference,
    cache_dir: Path,
    *,
    access: HubAccess | None = None,
    retry: RetryPolicy | None = None,
    progress: Progress | None = None,
) -> Path:
    """Have a model in ``cache_dir`` (layout: ``cache.py``) and return its directory.

    A complete one is returned as it is. Otherwise its revision is resolved to a commit once,
    and what serving needs is downloaded, going on from where an earlier attempt stopped. Only
    one process downloads a model at a time; the others wait and find it done. FetchError says
    what to change; what was received until then is kept.
    """
    cache = ModelCache(cache_dir, reference)
    with _disk_errors(cache_dir):
        if (found := cache.find()) is not None:
            return found
        cache.root.mkdir(parents=True, exist_ok=True)
        with exclusive(cache.lock):
            if (found := cache.find()) is not None:
                return found
            with (
                closing(HubClient(access or access_from(), reference)) as client,
                closing(progress or choose_progress()) as shown,
            ):
                return _download(reference, cache, client, retry or RetryPolicy(), shown)


def fetch_description(reference: HubReference, cache_dir: Path, temporary: Path) -> Path:
    """A directory with the model's config.json and generation_config.json, and perhaps no more.

    The one in ``cache_dir`` where it is complete; else only these two files are downloaded, into ``temporary``.
    """
    with _disk_errors(cache_dir):
        if (found := ModelCache(cache_dir, reference).find()) is not None:
            return found
    scratch = ModelCache(temporary, reference)
    with _disk_errors(temporary), closing(HubClient(access_from(), reference)) as client:
        retry = RetryPolicy()
        listing = parse_listing(reference, retry.run(str(reference), threading.Event(), client.listing))
        scratch.prepare(listing.commit)
        wanted = [file for file in listing.descriptions() if file.name in (CONFIG, GENERATION_CONFIG)]
        with closing(choose_progress()) as shown:
            Transfer(client, scratch, listing.commit, retry=retry, progress=shown).run(wanted)
    return scratch.snapshot(listing.commit)


def _download(
    reference: HubReference, cache: ModelCache, client: HubClient, retry: RetryPolicy, progress: Progress
) -> Path:
    body = retry.run(str(reference), threading.Event(), client.listing)
    listing = parse_listing(reference, body)
    log.event("fetch_started", model=reference, commit=listing.commit, cache=cache.root)
    cache.prepare(listing.commit)
    transfer = Transfer(client, cache, listing.commit, retry=retry, progress=progress)
    descriptions = listing.descriptions()
    transfer.run(descriptions)
    weights = listing.weights(_read_index(cache.snapshot(listing.commit), listing))
    transfer.run(weights)
    files = descriptions + weights
    path = cache.complete(listing.commit, {file.name: file.size_bytes for file in files})
    total = sum(file.size_bytes for file in files)
    log.event("fetch_finished", model=reference, files=len(files), bytes=total, path=path)
    return path


def _read_index(snapshot: Path, listing: Listing) -> bytes | None:
    listed = any(file.name == INDEX for file in listing.files)
    return (snapshot / INDEX).read_bytes() if listed else None


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
            "or use another --cache-dir"
        ) from error
