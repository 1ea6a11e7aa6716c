"""Client of peers: fetchers of other nodes that have a model, and send its files so that the source is read once.

A peer is trusted with the list of files and their digests because both sides hold one token; the content is verified
by digest like that of the hub. A file that is cut off is continued from the byte where it ended, by the same peer or by
the next one, also after a restart of this process.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import quote

import httpx2
import msgspec

from skiff_runtime.contract import ENV_PEER_TOKEN, FLAG_PEER, PATH_PEER_FILES, PATH_PEER_MANIFEST
from skiff_runtime.errors import ConfigError, FetchError
from skiff_runtime.hub.hub_reference import HubReference, is_commit
from skiff_runtime.hub.model_cache import ModelCache
from skiff_runtime.hub.repository import MAX_FILES, POOLING_CONFIG, RemoteFile, RepositoryListing

MAX_PEERS: Final = 16
MIN_TOKEN_CHARACTERS: Final = 16
ATTEMPTS: Final = 4
"""Requests to one peer in a row that bring no byte."""
BASE_WAIT_SECONDS: Final = 0.5
"""Wait before the second attempt; it doubles with each further attempt. A peer that restarts is back within seconds."""
_TIMEOUT: Final = httpx2.Timeout(30.0, connect=5.0)
_MAX_MANIFEST_BYTES: Final = 4 << 20
_CHUNK_BYTES: Final = 1 << 20
_RANGE_NOT_SATISFIABLE: Final = 416
_DIGEST_LENGTHS: Final = (40, 64)


class PeerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a manifest, with the fields of ``RemoteFile``."""

    name: str
    size_bytes: int
    digest: str


class PeerManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The verified files of one model at one commit, as a peer offers them."""

    model: str
    commit: str
    files: list[PeerFile]


class PeerError(FetchError):
    """A peer does not answer, or does not have the model."""


class PeerClient:
    """The peers of one fetch, in the order of preference. Its interface is that of ``HubClient``."""

    def __init__(self, reference: HubReference, cache: ModelCache, urls: list[str], token: str) -> None:
        check_peers(urls, token)
        self.stop = threading.Event()
        self._reference = reference
        self._cache = cache
        self._urls = [url.rstrip("/") for url in urls]
        self._digests: dict[str, str] = {}
        self._downloads: Counter[str] = Counter()
        # No proxy of the environment: it would see the token.
        self._http = httpx2.Client(
            headers={"Authorization": f"Bearer {token}"}, timeout=_TIMEOUT, trust_env=False
        )

    def list_files(self) -> RepositoryListing:
        """Return the files of the first peer that has the model. Raises ``PeerError`` if none has it."""
        failures = []
        for url in self._urls:
            try:
                manifest = self._read_manifest(url)
            except PeerError as error:
                failures.append(f"{url}: {error}")
                continue
            self._urls = [url, *(each for each in self._urls if each != url)]
            self._digests = {file.name: file.digest for file in manifest.files}
            files = [RemoteFile(file.name, file.size_bytes, file.digest) for file in manifest.files]
            return RepositoryListing(manifest.commit, files)
        raise PeerError("; ".join(failures))

    def download(self, commit: str, name: str, cache_dir: Path) -> Path:
        """Return the file's path in the cache, after downloading it if it is missing. Raises ``PeerError``."""
        digest = self._digests[name]
        if not self._cache.has_blob(digest):
            partial = self._cache.peer_partial(digest)
            # A second download of a name follows a wrong checksum, so it begins with another peer.
            first = self._downloads[name] % len(self._urls)
            self._downloads[name] += 1
            failures = []
            for url in (*self._urls[first:], *self._urls[:first]):
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
        self.stop.set()
        self._http.close()

    def _read_manifest(self, url: str) -> PeerManifest:
        failure: Exception | None = None
        for _ in self._attempts():
            try:
                with self._http.stream("GET", f"{url}{PATH_PEER_MANIFEST}") as response:
                    _check_status(response)
                    body = bytearray()
                    for chunk in response.iter_bytes():
                        body += chunk
                        if len(body) > _MAX_MANIFEST_BYTES:
                            raise PeerError(f"its manifest is longer than {_MAX_MANIFEST_BYTES} bytes")
            except (httpx2.TransportError, _Busy) as error:
                failure = error
                continue
            return self._check_manifest(bytes(body))
        raise _no_answer(failure)

    def _check_manifest(self, body: bytes) -> PeerManifest:
        try:
            manifest = msgspec.json.decode(body, type=PeerManifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PeerError(f"its manifest is malformed: {error}") from None
        wanted, revision = manifest_model(self._reference), self._reference.revision
        if manifest.model != wanted:
            raise PeerError(f"it has {manifest.model!r} and not {wanted!r}")
        if not is_commit(manifest.commit) or (is_commit(revision) and revision != manifest.commit):
            raise PeerError(f"it has commit {manifest.commit!r} and not revision {revision!r}")
        if len(manifest.files) > MAX_FILES:
            raise PeerError(f"its manifest has more than {MAX_FILES} files")
        for file in manifest.files:
            if not _is_valid(file):
                raise PeerError(f"its manifest has an invalid entry {file.name!r}")
        return manifest

    def _continue_file(self, url: str, partial: Path) -> None:
        """Append what ``partial`` lacks of the file at ``url``; attempts count anew whenever bytes have arrived."""
        failure: Exception | None = None
        progressed = True
        while progressed:
            progressed = False
            for _ in self._attempts():
                start = partial.stat().st_size if partial.exists() else 0
                try:
                    self._append(url, partial, start)
                    return
                except (httpx2.TransportError, _Busy) as error:
                    failure = error
                if partial.exists() and partial.stat().st_size > start:
                    progressed = True
                    break
        raise _no_answer(failure)

    def _append(self, url: str, partial: Path, start: int) -> None:
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._http.stream("GET", url, headers=headers) as response:
            if start and response.status_code == _RANGE_NOT_SATISFIABLE:
                return  # it was complete already; the checksum decides
            _check_status(response)
            is_rest = response.status_code == httpx2.codes.PARTIAL_CONTENT
            with partial.open("ab" if is_rest else "wb") as stream:
                for chunk in response.iter_raw(_CHUNK_BYTES):
                    if self.stop.is_set():
                        raise PeerError("stopped")
                    stream.write(chunk)

    def _attempts(self) -> Iterator[int]:
        for attempt in range(ATTEMPTS):
            if attempt and self.stop.wait(BASE_WAIT_SECONDS * 2 ** (attempt - 1)):
                raise PeerError("stopped while waiting to try again")
            yield attempt


class _Busy(Exception):
    """The peer asks to try again later."""


def manifest_model(reference: HubReference) -> str:
    """Return the name of a model in manifests: ``org/name``, with the quantization of a GGUF file."""
    return reference.model_id + (f":{reference.quant_type}" if reference.quant_type else "")


def check_token(token: str) -> None:
    """Raise ``ConfigError`` for a token that is absent, short, or no text that a header can hold."""
    if len(token) < MIN_TOKEN_CHARACTERS or not (
        token.isascii() and token.isprintable() and " " not in token
    ):
        raise ConfigError(
            f"{ENV_PEER_TOKEN} must be set to at least {MIN_TOKEN_CHARACTERS} printable ASCII characters without spaces, "
            "the same on all peers"
        )


def check_peers(urls: list[str], token: str) -> None:
    """Raise ``ConfigError`` for malformed addresses of peers, too many of them, or a wrong token."""
    check_token(token)
    if len(urls) > MAX_PEERS:
        raise ConfigError(f"{FLAG_PEER} is given {len(urls)} times; at most {MAX_PEERS} peers are possible")
    for url in urls:
        try:
            parts = httpx2.URL(url)
        except (httpx2.InvalidURL, TypeError):
            parts = httpx2.URL("")
        if parts.scheme not in ("http", "https") or not parts.host or parts.path not in ("", "/"):
            raise ConfigError(f"{FLAG_PEER} {url!r} is not an address; write http://HOST:PORT")


def _no_answer(failure: Exception | None) -> PeerError:
    return PeerError(f"no answer ({str(failure) or type(failure).__name__})")


def _check_status(response: httpx2.Response) -> None:
    status = response.status_code
    if status in (httpx2.codes.OK, httpx2.codes.PARTIAL_CONTENT):
        return
    if status in (httpx2.codes.SERVICE_UNAVAILABLE, httpx2.codes.TOO_MANY_REQUESTS):
        raise _Busy(f"it answered {status}: it does not have the model yet, or is busy")
    if status == httpx2.codes.UNAUTHORIZED:
        raise PeerError(f"it refuses the token (401); set the same {ENV_PEER_TOKEN} on all peers")
    raise PeerError(f"it answered {status}")


def _is_valid(file: PeerFile) -> bool:
    top_level = "/" not in file.name and file.name not in ("", ".", "..") and file.name.isprintable()
    hexadecimal = set(file.digest) <= set("0123456789abcdef")
    return (
        (top_level or POOLING_CONFIG.fullmatch(file.name) is not None)
        and file.size_bytes >= 0
        and len(file.digest) in _DIGEST_LENGTHS
        and hexadecimal
    )
