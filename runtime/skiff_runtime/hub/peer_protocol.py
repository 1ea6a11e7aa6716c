"""Protocol of peers: fetchers of other nodes that have a model, and send its files so that the source is read once.

A peer is trusted with the list of files and their digests because both sides hold one token; the content is verified
by digest like that of the source.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import httpx2
import msgspec

from skiff_runtime.contract import ENV_PEER_TOKEN, FLAG_PEER, PATH_PEER_MANIFEST
from skiff_runtime.errors import ConfigError, FetchError
from skiff_runtime.hub.repository import MAX_FILES, POOLING_CONFIG, RemoteFile, RepositoryListing

MAX_PEERS: Final = 16
MIN_TOKEN_CHARACTERS: Final = 16
ATTEMPTS: Final = 4
"""Requests to one peer in a row that bring no byte."""
BASE_WAIT_SECONDS: Final = 0.5
"""Wait before the second attempt; it doubles with each further attempt. A peer that restarts is back within seconds."""
RANGE_NOT_SATISFIABLE: Final = 416
_TIMEOUT: Final = httpx2.Timeout(30.0, connect=5.0)
_MAX_MANIFEST_BYTES: Final = 4 << 20
_DIGEST_LENGTHS: Final = (40, 64)


class PeerFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of a manifest, with the fields of ``RemoteFile``."""

    name: str
    size_bytes: int
    digest: str


class PeerManifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The verified files of one model at one version, as a peer offers them. ``commit``: the commit or the source's version."""

    model: str
    commit: str
    files: list[PeerFile]


class PeerError(FetchError):
    """A peer does not answer, or does not have the model."""


class PeerUnavailable(Exception):
    """A request to a peer failed, and may succeed if it is sent again."""


class PeerConnections:
    """HTTP connections to the peers of one fetch, in the order of preference."""

    def __init__(self, urls: list[str], token: str) -> None:
        check_peers(urls, token)
        self.urls = [url.rstrip("/") for url in urls]
        self.stop = threading.Event()
        # No proxy of the environment: it would see the token.
        self._http = httpx2.Client(
            headers={"Authorization": f"Bearer {token}"}, timeout=_TIMEOUT, trust_env=False
        )

    def list_files(self, check: Callable[[PeerManifest], None]) -> RepositoryListing:
        """Return the files of the first peer that has the model, which becomes the first choice for them.

        ``check`` raises ``PeerError`` for the manifest of another model. Raises ``PeerError`` if no peer has it.
        """
        failures = []
        for url in self.urls:
            try:
                manifest = self._read_manifest(url)
                check(manifest)
            except PeerError as error:
                failures.append(f"{url}: {error}")
                continue
            self.urls = [url, *(each for each in self.urls if each != url)]
            files = [RemoteFile(file.name, file.size_bytes, file.digest) for file in manifest.files]
            return RepositoryListing(manifest.commit, files)
        raise PeerError("; ".join(failures))

    @contextmanager
    def get(self, url: str, headers: dict[str, str] | None = None) -> Iterator[httpx2.Response]:
        """Send one request. Raises ``PeerUnavailable`` if it may be sent again, and ``PeerError``.

        The answer may be ``RANGE_NOT_SATISFIABLE`` to a request with headers, which are those of a range.
        """
        try:
            with self._http.stream("GET", url, headers=headers) as response:
                if not (headers and response.status_code == RANGE_NOT_SATISFIABLE):
                    _check_status(response.status_code)
                yield response
        except httpx2.TransportError as error:
            raise PeerUnavailable(str(error) or type(error).__name__) from error

    def attempts(self) -> Iterator[int]:
        """Count the attempts at one request, and wait between them. Raises ``PeerError`` once ``stop`` is set."""
        for attempt in range(ATTEMPTS):
            if attempt and self.stop.wait(BASE_WAIT_SECONDS * 2 ** (attempt - 1)):
                raise PeerError("stopped while waiting to try again")
            yield attempt

    def close(self) -> None:
        """Stop all downloads and close the connections."""
        self.stop.set()
        self._http.close()

    def _read_manifest(self, url: str) -> PeerManifest:
        failure: Exception | None = None
        for _ in self.attempts():
            try:
                with self.get(f"{url}{PATH_PEER_MANIFEST}") as response:
                    body = bytearray()
                    for chunk in response.iter_bytes():
                        body += chunk
                        if len(body) > _MAX_MANIFEST_BYTES:
                            raise PeerError(f"its manifest is longer than {_MAX_MANIFEST_BYTES} bytes")
            except PeerUnavailable as error:
                failure = error
                continue
            return decode_manifest(bytes(body))
        raise no_answer(failure)


def decode_manifest(body: bytes) -> PeerManifest:
    """Return the manifest in a peer's answer. Raises ``PeerError`` for one that is malformed."""
    try:
        manifest = msgspec.json.decode(body, type=PeerManifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerError(f"its manifest is malformed: {error}") from None
    if len(manifest.files) > MAX_FILES:
        raise PeerError(f"its manifest has more than {MAX_FILES} files")
    for file in manifest.files:
        if not _is_valid(file):
            raise PeerError(f"its manifest has an invalid entry {file.name!r}")
    return manifest


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


def no_answer(failure: Exception | None) -> PeerError:
    """Return the error for a peer that did not answer any attempt."""
    return PeerError(f"no answer ({failure})")


def _check_status(status: int) -> None:
    if status in (httpx2.codes.OK, httpx2.codes.PARTIAL_CONTENT):
        return
    if status in (httpx2.codes.SERVICE_UNAVAILABLE, httpx2.codes.TOO_MANY_REQUESTS):
        raise PeerUnavailable(f"it answered {status}: it does not have the model yet, or is busy")
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
