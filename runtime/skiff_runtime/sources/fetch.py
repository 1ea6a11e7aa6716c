"""Download of a model by its URI, whatever its source, into a directory that can be served."""

import hashlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from skiff_runtime import log
from skiff_runtime.contract import FLAG_REVISION
from skiff_runtime.errors import ConfigError, FetchError
from skiff_runtime.hub.fetch import Peers, disk_errors, fetch
from skiff_runtime.hub.file_lock import WAIT_SECONDS, exclusive_lock
from skiff_runtime.hub.hub_reference import SCHEME as HUB_SCHEME
from skiff_runtime.hub.hub_reference import parse_reference
from skiff_runtime.hub.model_cache import ModelCache
from skiff_runtime.hub.repository import ADAPTER_CONFIG, CONFIG, POOLING_CONFIG, RemoteFile, RepositoryListing
from skiff_runtime.sources.directory_cache import DirectoryCache
from skiff_runtime.sources.model_source import ModelSource, SourceListing, check_limits
from skiff_runtime.sources.source_reference import (
    RegistryReference,
    SourceReference,
    is_source_uri,
    parse_source,
)
from skiff_runtime.transfer.parallel_download import allocated_bytes, download_all

_VERSION_DIGITS: Final = 32
_WAIT_POLL_SECONDS: Final = 0.5
_WAIT_REPORT_SECONDS: Final = 15.0


def is_remote(uri: str) -> bool:
    """Return whether a model is downloaded before it is served."""
    return uri.startswith(HUB_SCHEME) or is_source_uri(uri)


def fetch_model(
    uri: str,
    revision: str | None,
    cache_dir: Path,
    *,
    peers: Peers | None = None,
    adapter_only: bool = False,
) -> Path:
    """Fetch the model or adapter of an hf://, s3://, gs:// or oci:// URI, and return its directory, or its GGUF file.

    ``peers`` come before the source; they must have the model. Raises ``ConfigError`` and ``FetchError``. With
    ``adapter_only``, raises ``ConfigError`` before the download of what is not a LoRA adapter, unless the cache or peers have it;
    files in an archive are unpacked first.
    """
    if not is_source_uri(uri):
        return fetch(parse_reference(uri, revision), cache_dir, peers=peers, adapter_only=adapter_only)
    return fetch_source(_parse_source(uri, revision), cache_dir, peers=peers, adapter_only=adapter_only)


def wait_for_model(uri: str, revision: str | None, cache_dir: Path) -> Path:
    """Wait until another process has completed the model in ``cache_dir``; return its directory or GGUF file.

    Nothing is written, so the directory may be read-only. Raises ``ConfigError``, and ``FetchError`` after
    ``WAIT_SECONDS``.
    """
    find = (
        DirectoryCache(cache_dir, _parse_source(uri, revision)).find_complete
        if is_source_uri(uri)
        else ModelCache(cache_dir, parse_reference(uri, revision)).find_verified
    )
    deadline = time.monotonic() + WAIT_SECONDS
    report_at = time.monotonic()
    while (found := find()) is None:
        if time.monotonic() > deadline:
            raise FetchError(
                f"{uri} was not completed in {cache_dir} within {WAIT_SECONDS / 3600:.0f} hours; look at what fetches it "
                "(in Kubernetes: kubectl get modelcache)"
            )
        if time.monotonic() >= report_at:
            log.event("fetch_waiting", reason="another process fetches this model", cache=cache_dir)
            report_at = time.monotonic() + _WAIT_REPORT_SECONDS
        time.sleep(_WAIT_POLL_SECONDS)
    return found


def find_fetched(uri: str, cache_dir: Path) -> Path | None:
    """Return the directory of an s3://, gs:// or oci:// model if it is complete in the cache, without network."""
    return DirectoryCache(cache_dir, parse_source(uri)).find_complete()


def fetch_source(
    reference: SourceReference,
    cache_dir: Path,
    *,
    peers: Peers | None = None,
    adapter_only: bool = False,
) -> Path:
    """Fetch a model into ``cache_dir`` (layout: ``directory_cache.py``), verify it, and return its directory.

    A complete model is returned without network, even if the source has changed. ``peers`` and ``adapter_only`` as for
    ``fetch_model``. Only one process downloads a model at a time; the others wait for it and use its result. Raises
    ``FetchError``; what has arrived is kept.
    """
    cache = DirectoryCache(cache_dir, reference)
    with disk_errors(cache_dir):
        if (found := cache.find_complete()) is not None:
            return found
        cache.prepare()
        with exclusive_lock(cache.lock_path):
            # Another process may have downloaded it while this one waited for the lock.
            if (found := cache.find_complete()) is not None:
                return found
            if peers is not None and (received := _fetch_from_peers(cache, reference, peers)) is not None:
                return received
            return _fetch_locked(cache, reference, _connect(reference), adapter_only=adapter_only)


def _parse_source(uri: str, revision: str | None) -> SourceReference:
    if revision is not None:
        raise ConfigError(
            f"{FLAG_REVISION} is for hf:// models; the version of {uri} is part of its path or tag"
        )
    return parse_source(uri)


def _fetch_from_peers(cache: DirectoryCache, reference: SourceReference, peers: Peers) -> Path | None:
    """Return the model that peers have sent; None if they could not, which is logged."""
    if not peers.urls:
        return None
    from skiff_runtime.sources.peer_source import PeerSource

    source = PeerSource(reference, peers)
    try:
        return _fetch_locked(cache, reference, source, origin="peers")
    except FetchError as error:
        log.warning("fetch_fell_back_to_source", model=reference, reason=str(error))
        return None
    finally:
        source.close()


def _connect(reference: SourceReference) -> ModelSource:
    # Imported only for a download: a complete model needs neither the clients nor their libraries.
    if isinstance(reference, RegistryReference):
        from skiff_runtime.sources.registry import Registry

        return Registry(reference)
    from skiff_runtime.sources.object_store import ObjectStore

    return ObjectStore(reference)


def _fetch_locked(
    cache: DirectoryCache,
    reference: SourceReference,
    source: ModelSource,
    *,
    origin: str = "source",
    adapter_only: bool = False,
) -> Path:
    listing = source.list_objects()
    check_limits([each.size_bytes for each in (*listing.files, *listing.archives)], str(reference))
    version = hashlib.sha256(listing.version.encode()).hexdigest()[:_VERSION_DIGITS]
    log.event("fetch_started", model=reference, version=listing.version, cache=cache.root, source=origin)
    partial = cache.open_partial(version)
    extracted = _unpack(cache, source, listing, partial)
    adapter_uri = str(reference) if adapter_only else None
    try:
        names = _download(cache, source, listing, partial, extracted, adapter_uri=adapter_uri)
    except ConfigError:
        shutil.rmtree(partial / "files", ignore_errors=True)  # extracted, and of no use
        raise
    path = cache.publish(partial, str(reference), listing.version, names, _sha256(listing, extracted))
    total = sum((path / name).stat().st_size for name in names)
    log.event("fetch_finished", model=reference, files=len(names), bytes=total, path=path)
    return path


def _sha256(listing: SourceListing, extracted: dict[str, int]) -> dict[str, str]:
    """Return the SHA-256 that the source gave for files, by which they were verified, under their names in the model."""
    folder = _find_folder([*(each.name for each in listing.files), *extracted])
    return {
        each.name.removeprefix(folder): each.digest.removeprefix("sha256:")
        for each in listing.files
        if each.digest.startswith("sha256:") and each.name not in extracted
    }


def _unpack(
    cache: DirectoryCache, source: ModelSource, listing: SourceListing, partial: Path
) -> dict[str, int]:
    """Download and extract the archives, and return the names and sizes of their files."""
    if not listing.archives:
        return {}
    from skiff_runtime.sources.archive import extract

    archives = partial / "archives"
    # Packed and extracted, an archive needs its size twice; a compressed one needs more, and is measured as it grows.
    cache.check_space(2 * sum(each.size_bytes for each in listing.archives) - allocated_bytes(partial))
    download_all(source, listing.archives, archives, partial / "parts")
    extracted: dict[str, int] = {}
    for each in listing.archives:
        extracted.update(extract(archives / each.name, partial / "files", what=each.name))
    return extracted


def _download(
    cache: DirectoryCache,
    source: ModelSource,
    listing: SourceListing,
    partial: Path,
    extracted: dict[str, int],
    *,
    adapter_uri: str | None,
) -> list[str]:
    """Download the files that serving needs, and return their names and those of extracted files that it needs.

    ``adapter_uri`` is given if the source must be an adapter.
    """
    target = partial / "files"
    folder = _find_folder([*(each.name for each in listing.files), *extracted])
    files = {
        each.name.removeprefix(folder): replace(each, name=each.name.removeprefix(folder))
        for each in listing.files
        if each.name.startswith(folder)
    }
    extracted = {
        name.removeprefix(folder): size for name, size in extracted.items() if name.startswith(folder)
    }
    if folder:
        for name in extracted:
            (target / name).parent.mkdir(exist_ok=True)
            (target / folder / name).replace(target / name)
    sizes = {name: each.size_bytes for name, each in files.items()} | extracted
    repository = RepositoryListing(
        listing.version,
        [
            RemoteFile(name, size, "")
            for name, size in sorted(sizes.items())
            if "/" not in name or POOLING_CONFIG.fullmatch(name)
        ],
    )
    if adapter_uri is not None:
        repository.require_adapter(adapter_uri)
    if repository.is_gguf:
        raise FetchError("the source has only GGUF files, which are served from hf:// or a directory")
    names: list[str] = []

    def download(chosen: list[RemoteFile]) -> None:
        wanted = [files[each.name] for each in chosen if each.name not in extracted]
        needed_bytes = sum(each.size_bytes for each in wanted if not (target / each.name).exists())
        cache.check_space(needed_bytes - allocated_bytes(partial / "parts"))
        download_all(source, wanted, target, partial / "parts")
        names.extend(each.name for each in chosen)

    download(repository.config_files())
    download(repository.weight_files(target))
    _remove_others(target, names)
    return names


def _find_folder(names: Sequence[str]) -> str:
    """Return the one folder that contains the model or adapter, with a slash; "" if it is at the top level."""
    for config in (CONFIG, ADAPTER_CONFIG):
        if config in names:
            return ""
        folders = [
            name.removesuffix(config)
            for name in names
            if name.endswith(f"/{config}") and name.count("/") == 1
        ]
        if folders:
            return folders[0] if len(folders) == 1 else ""
    return ""


def _remove_others(target: Path, names: Sequence[str]) -> None:
    """Remove extracted files that the model does not need, and folders that are empty."""
    for path in sorted(target.rglob("*"), reverse=True):
        if path.is_file() and str(path.relative_to(target)) not in names:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()
