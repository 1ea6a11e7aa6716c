"""Client of peers for a model of the hub.

A file that is cut off is continued from the byte where it ended, by the same peer or by the next one, also after a
restart of this process.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import httpx2

from skiff_runtime.contract import PATH_PEER_FILES
from skiff_runtime.hub.hub_reference import HubReference, is_commit
from skiff_runtime.hub.model_cache import ModelCache
from skiff_runtime.hub.peer_protocol import (
    RANGE_NOT_SATISFIABLE,
    PeerConnections,
    PeerError,
    PeerManifest,
    PeerUnavailable,
    no_answer,
)
from skiff_runtime.hub.repository import RemoteFile, RepositoryListing

_CHUNK_BYTES: Final = 1 << 20


class PeerClient:
    """The peers of one fetch, in the order of preference. Its interface is that of ``HubClient``."""

    def __init__(self, reference: HubReference, cache: ModelCache, urls: list[str], token: str) -> None:
        self._reference = reference
        self._cache = cache
        self._peers = PeerConnections(urls, token)
        self.stop = self._peers.stop
        self._digests: dict[str, str] = {}
        self._downloads: Counter[str] = Counter()

    def list_files(self) -> RepositoryListing:
        """Return the files of the first peer that has the model. Raises ``PeerError`` if none has it."""
        listing = self._peers.list_files(self.check_manifest)
        self._digests = {file.name: file.digest for file in listing.files}
        return listing

    def download(self, commit: str, name: str, cache_dir: Path) -> Path:
        """Return the file's path in the cache, after downloading it if it is missing. Raises ``PeerError``."""
        digest = self._digests[name]
        if not self._cache.has_blob(digest):
            partial = self._cache.peer_partial(digest)
            urls = self._peers.urls
            # A second download of a name follows a wrong checksum, so it begins with another peer.
            first = self._downloads[name] % len(urls)
            self._downloads[name] += 1
            failures = []
            for url in (*urls[first:], *urls[:first]):
                try:
                    self._continue_file(f"{url}{PATH_PEER_FILES}/{commit}/{quote(name)}", partial)
                    break
                except PeerError as error:
                    failures.append(f"{url}: {error}")
            else:
                raise PeerError(f"{name}: {'; '.join(failures)}")
            self._cache.store_blob(partial, digest)
        return self._cache.link_blob(commit, name, digest)

    def find_ranges(self, commit: str, files: Sequence[RemoteFile]) -> None:
        """Return None: a peer sends each file in one stream."""

    def close(self) -> None:
        """Stop all downloads and close the connections."""
        self._peers.close()

    def check_manifest(self, manifest: PeerManifest) -> None:
        """Raise ``PeerError`` for the manifest of another model or commit."""
        wanted, revision = manifest_model(self._reference), self._reference.revision
        if manifest.model != wanted:
            raise PeerError(f"it has {manifest.model!r} and not {wanted!r}")
        if not is_commit(manifest.commit) or (is_commit(revision) and revision != manifest.commit):
            raise PeerError(f"it has commit {manifest.commit!r} and not revision {revision!r}")

    def _continue_file(self, url: str, partial: Path) -> None:
        """Append what ``partial`` lacks of the file at ``url``; attempts count anew whenever bytes have arrived."""
        failure: Exception | None = None
        progressed = True
        while progressed:
            progressed = False
            for _ in self._peers.attempts():
                start = partial.stat().st_size if partial.exists() else 0
                try:
                    self._append(url, partial, start)
                    return
                except PeerUnavailable as error:
                    failure = error
                if partial.exists() and partial.stat().st_size > start:
                    progressed = True
                    break
        raise no_answer(failure)

    def _append(self, url: str, partial: Path, start: int) -> None:
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._peers.get(url, headers) as response:
            if response.status_code == RANGE_NOT_SATISFIABLE:
                return  # it was complete already; the checksum decides
            is_rest = response.status_code == httpx2.codes.PARTIAL_CONTENT
            with partial.open("ab" if is_rest else "wb") as stream:
                for chunk in response.iter_raw(_CHUNK_BYTES):
                    if self.stop.is_set():
                        raise PeerError("stopped")
                    stream.write(chunk)


def manifest_model(reference: HubReference) -> str:
    """Return the name of a model in manifests: ``org/name``, with the quantization of a GGUF file."""
    return reference.model_id + (f":{reference.quant_type}" if reference.quant_type else "")
