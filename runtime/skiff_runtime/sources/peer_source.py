"""Peers as the source of a model of an object store or a registry: fetchers of other nodes that have it.

The first fetcher verifies the model as far as its source permits, and computes the SHA-256 of each file. Every later one
verifies what it receives by these digests, which it trusts because both sides hold one token.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import quote

from skiff_runtime.contract import PATH_PEER_FILES
from skiff_runtime.hub.fetch import Peers
from skiff_runtime.hub.peer_protocol import PeerConnections, PeerError, PeerManifest, PeerUnavailable
from skiff_runtime.sources.model_source import SourceListing
from skiff_runtime.sources.source_reference import SourceReference
from skiff_runtime.transfer.range_source import RemoteObject, TransientSourceError

_SHA256_DIGITS: Final = 64
_VERSION: Final = re.compile(r"[A-Za-z0-9:._-]{1,128}")
_PIECE_BYTES: Final = 1 << 20
_PARTIAL_CONTENT: Final = 206


class PeerSource:
    """A ``ModelSource`` that reads from peers."""

    def __init__(self, reference: SourceReference, peers: Peers) -> None:
        self._reference = reference
        self._peers = PeerConnections(list(peers.urls), peers.token)
        self._version = ""
        self._requests: Counter[tuple[str, int]] = Counter()

    def list_objects(self) -> SourceListing:
        """Return the files of the first peer that has the model. Raises ``PeerError`` if none has it."""
        listing = self._peers.list_files(self.check_manifest)
        self._version = listing.commit
        files = [
            RemoteObject(
                name=file.name, key=file.name, size_bytes=file.size_bytes, digest=f"sha256:{file.digest}"
            )
            for file in listing.files
        ]
        return SourceListing(listing.commit, files)

    def supports_ranges(self, remote: RemoteObject) -> bool:
        """Return True: every peer does."""
        return True

    def stream(self, remote: RemoteObject, start: int, stop: int) -> Iterator[Any]:
        """Yield a range of a file; of another peer if the range was requested before, so that it failed or was damaged."""
        urls = self._peers.urls
        first = self._requests[remote.key, start] % len(urls)
        self._requests[remote.key, start] += 1
        headers = {"Range": f"bytes={start}-{stop - 1}"}
        failures = []
        for url in (*urls[first:], *urls[:first]):
            begun = False
            try:
                path = f"{PATH_PEER_FILES}/{quote(self._version)}/{quote(remote.key)}"
                with self._peers.get(f"{url}{path}", headers) as response:
                    if response.status_code != _PARTIAL_CONTENT:
                        raise PeerError(f"it does not answer a request for a range ({response.status_code})")
                    for piece in response.iter_raw(_PIECE_BYTES):
                        begun = True
                        yield piece
                return
            except (PeerError, PeerUnavailable) as error:
                if begun:
                    raise TransientSourceError(f"{url}: {error}") from error
                failures.append(f"{url}: {error}")
        raise TransientSourceError("; ".join(failures))

    def close(self) -> None:
        """Close the connections."""
        self._peers.close()

    def check_manifest(self, manifest: PeerManifest) -> None:
        """Raise ``PeerError`` for the manifest of another model or version, or one without SHA-256."""
        wanted = str(self._reference)
        if manifest.model != wanted:
            raise PeerError(f"it has {manifest.model!r} and not {wanted!r}")
        if not _VERSION.fullmatch(manifest.commit) or not manifest.files:
            raise PeerError("its manifest has no version, or no files")
        for file in manifest.files:
            if len(file.digest) != _SHA256_DIGITS:
                raise PeerError(f"its manifest has no SHA-256 of {file.name!r}")
