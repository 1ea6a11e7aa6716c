"""Client of an OCI registry for one artifact, by the distribution API: files and tar archives as layers.

Artifacts of ORAS (a layer for each file, named by ``org.opencontainers.image.title``) and of the ModelPack specification
(``org.cncf.model.filepath``; raw layers and tar layers) are understood. Blobs are verified by their digests.
"""

import base64
import binascii
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2

from skiff_runtime.contract import ENV_OCI_CREDENTIALS, ENV_OCI_ENDPOINT
from skiff_runtime.errors import FetchError
from skiff_runtime.sources.archive import is_wanted, safe_name
from skiff_runtime.sources.model_source import SourceListing
from skiff_runtime.sources.source_reference import RegistryReference
from skiff_runtime.transfer.parallel_download import STREAMS
from skiff_runtime.transfer.range_source import RemoteObject, TransientSourceError
from skiff_runtime.transfer.retries import retry
from skiff_runtime.version import __version__

_TITLE: Final = "org.opencontainers.image.title"
_FILE_PATH: Final = "org.cncf.model.filepath"
_UNPACK: Final = "io.deis.oras.content.unpack"
_IMAGE_LAYER: Final = "application/vnd.oci.image.layer."
_MANIFEST_TYPES: Final = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_INDEX_TYPES: Final = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_ARCHIVE: Final = re.compile(r".*[.+]tar([.+]gzip|\.gz)?")
_COMPRESSED_OTHERWISE: Final = re.compile(r".*[.+]zstd|.*[.+]xz|.*[.+]bzip2")
_BESIDE_THE_MODEL: Final = re.compile(
    r"application/vnd\.(cncf\.model|kitops\.modelkit)\.(doc|docs|code|dataset)\..*"
)
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_CHALLENGE: Final = re.compile(r'([a-z_]+)="([^"]*)"')
_LOCAL: Final = re.compile(r"(localhost|127\.0\.0\.1)(:[0-9]+)?")
_DOCKER_HUB: Final = ("docker.io", "index.docker.io")
_DOCKER_HUB_ENDPOINT: Final = "https://registry-1.docker.io"
_TRANSIENT_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
_MAX_MANIFEST_BYTES: Final = 4 << 20
_PIECE_BYTES: Final = 256 << 10
_TIMEOUT: Final = httpx2.Timeout(60.0, connect=10.0)


class Registry:
    """Client of one registry for one artifact."""

    def __init__(self, reference: RegistryReference) -> None:
        self._reference = reference
        scheme = "http" if _LOCAL.fullmatch(reference.registry) else "https"
        hub = _DOCKER_HUB_ENDPOINT if reference.registry in _DOCKER_HUB else ""
        self._base = reference.endpoint or hub or f"{scheme}://{reference.registry}"
        self._host = urlsplit(self._base).hostname or ""
        self._credentials = _read_credentials(reference)
        self._authorization = ""
        self._token_lock, self._ranges_lock, self._stop = (
            threading.Lock(),
            threading.Lock(),
            threading.Event(),
        )
        self._ranges: bool | None = None
        self._client = httpx2.Client(
            follow_redirects=True,
            timeout=_TIMEOUT,
            limits=httpx2.Limits(max_connections=2 * STREAMS),
            headers={"User-Agent": f"skiff/{__version__}"},
        )

    def list_objects(self) -> SourceListing:
        """Return the layers of the artifact that may be files of a model. Raises ``FetchError``."""
        version, manifest = self._read_manifest(self._reference.version)
        if manifest.get("mediaType") in _INDEX_TYPES or "manifests" in manifest:
            digests = [str(each.get("digest")) for each in manifest.get("manifests") or []]
            if len(digests) != 1:
                raise FetchError(
                    f"{self._reference} is an index of {len(digests)} manifests; name one by its digest, as in "
                    f"oci://{self._reference.registry}/{self._reference.repository}@sha256:..."
                )
            version, manifest = self._read_manifest(digests[0])
        files: dict[str, RemoteObject] = {}
        archives: list[RemoteObject] = []
        for layer in manifest.get("layers") or []:
            read = self._read_layer(layer)
            if read is None:
                continue
            remote, is_archive = read
            if is_archive:
                archives.append(remote)
            elif remote.name in files:
                raise FetchError(f"{self._reference} has two layers of the name {remote.name}")
            elif is_wanted(remote.name):
                files[remote.name] = remote
        if not files and not archives:
            raise FetchError(
                f"{self._reference} has no layers that are files of a model; push one with oras or modctl: container "
                "images are not read"
            )
        return SourceListing(version, list(files.values()), archives)

    def supports_ranges(self, remote: RemoteObject) -> bool:
        """Return whether the registry answers requests for ranges; asked once."""
        with self._ranges_lock:
            if self._ranges is None and remote.size_bytes > 1:
                self._ranges = retry(remote.name, self._stop, lambda: self._answers_range(remote))
            return bool(self._ranges)

    def stream(self, remote: RemoteObject, start: int, stop: int) -> Iterator[Any]:
        """Yield a range of a blob; without ranges, from the beginning."""
        headers = {"Accept-Encoding": "identity"}
        if stop - start < remote.size_bytes:
            headers["Range"] = f"bytes={start}-{stop - 1}"
        with self._get(f"blobs/{remote.key}", headers, remote.name) as response:
            answered = response.headers.get("Content-Range", "")
            if "Range" in headers and not answered.startswith(f"bytes {start}-"):
                raise FetchError(
                    f"{self._host} does not answer requests for ranges of {remote.name} any more"
                )
            yield from response.iter_raw(_PIECE_BYTES)

    def _answers_range(self, remote: RemoteObject) -> bool:
        with self._get(f"blobs/{remote.key}", {"Range": "bytes=1-1"}, remote.name) as response:
            return response.status_code == 206 and response.headers.get("Content-Range", "").startswith(
                "bytes 1-1/"
            )

    def _read_manifest(self, version: str) -> tuple[str, dict[str, Any]]:
        headers = {"Accept": ", ".join((*_MANIFEST_TYPES, *_INDEX_TYPES))}

        def read() -> bytes:
            with self._get(f"manifests/{version}", headers, version) as response:
                return _read_bounded(response, f"the manifest of {self._reference}")

        content = retry(str(self._reference), self._stop, read)
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if _DIGEST.fullmatch(version) and digest != version:
            raise FetchError(f"{self._host} answered a manifest of another digest ({digest}) to {version}")
        try:
            manifest = json.loads(content)
        except ValueError as error:
            raise FetchError(
                f"{self._host} does not answer like a registry: the manifest is not JSON"
            ) from error
        if not isinstance(manifest, dict) or not all(
            isinstance(each, dict)
            for each in (*(manifest.get("layers") or ()), *(manifest.get("manifests") or ()))
        ):
            raise FetchError(f"the manifest of {self._reference} is malformed")
        return digest, manifest

    def _read_layer(self, layer: dict[str, Any]) -> tuple[RemoteObject, bool] | None:
        """Return a layer, and whether it is an archive; None for one that is no part of the model."""
        media_type, digest, size = (layer.get(key) for key in ("mediaType", "digest", "size"))
        annotations = layer.get("annotations") or {}
        if not isinstance(digest, str) or not _DIGEST.fullmatch(digest) or not isinstance(size, int):
            raise FetchError(f"{self._reference} has a layer without a sha256 digest and a size")
        media_type = str(media_type)
        if _BESIDE_THE_MODEL.fullmatch(media_type):
            return None
        title = annotations.get(_FILE_PATH) or annotations.get(_TITLE)
        is_image_layer = media_type.startswith(_IMAGE_LAYER)
        if is_image_layer and title is None:
            return None
        # ORAS gives plain files the type of an image's layer, and marks the folders that it packs.
        is_archive = annotations.get(_UNPACK) == "true" or bool(
            _ARCHIVE.fullmatch(media_type) and not is_image_layer
        )
        if _COMPRESSED_OTHERWISE.fullmatch(media_type):
            raise FetchError(
                f"{self._reference} has a layer of the type {media_type}; push it as tar or tar+gzip"
            )
        if is_archive:
            return RemoteObject(f"{digest.removeprefix('sha256:')}.tar", digest, size, digest), True
        if not isinstance(title, str):
            return None
        return RemoteObject(safe_name(title, str(self._reference)), digest, size, digest), False

    @contextmanager
    def _get(self, path: str, headers: dict[str, str], what: str) -> Iterator[httpx2.Response]:
        """Request a part of the repository, with a token if the registry demands one. Raises ``FetchError``."""
        url = f"{self._base}/v2/{self._reference.repository}/{path}"
        try:
            for is_last in (False, True):
                used = self._authorization
                sent = {**headers, "Authorization": used} if used else headers
                with self._client.stream("GET", url, headers=sent) as response:
                    if (
                        response.status_code == 401
                        and not is_last
                        and urlsplit(str(response.url)).hostname == self._host
                    ):
                        challenge = response.headers.get("WWW-Authenticate", "")
                        self._authenticate(challenge, used)
                        continue
                    if response.status_code not in (200, 206):
                        raise self._refusal(response.status_code, what)
                    yield response
                return
        except httpx2.TooManyRedirects as error:
            raise FetchError(f"{self._host} redirects in a loop") from error
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise TransientSourceError(
                f"no answer from {self._host} ({str(error) or type(error).__name__}); check the network, the proxy and "
                f"{ENV_OCI_ENDPOINT}"
            ) from error

    def _authenticate(self, challenge: str, used: str) -> None:
        """Get a token as the registry's challenge says, unless another thread has one already."""
        with self._token_lock:
            if self._authorization != used:
                return
            kind, _, rest = challenge.partition(" ")
            if kind.lower() == "basic":
                if self._credentials is None:
                    raise self._refusal(401, self._reference.version)
                self._authorization = f"Basic {self._credentials}"
                return
            fields = dict(_CHALLENGE.findall(rest))
            realm = urlsplit(fields.get("realm", ""))
            allowed = ("https",) if self._base.startswith("https://") else ("https", "http")
            if kind.lower() != "bearer" or realm.scheme not in allowed or not realm.hostname:
                raise FetchError(f"{self._host} demands an authentication that is not supported")
            query = {"scope": fields.get("scope") or f"repository:{self._reference.repository}:pull"}
            if "service" in fields:
                query["service"] = fields["service"]
            headers = {"Authorization": f"Basic {self._credentials}"} if self._credentials else {}
            with self._client.stream("GET", fields["realm"], params=query, headers=headers) as response:
                if response.status_code != 200:
                    raise self._refusal(response.status_code, "a token")
                content = _read_bounded(response, "the token")
            try:
                answer = json.loads(content)
                token = answer.get("token") or answer["access_token"]
            except (ValueError, KeyError, AttributeError) as error:
                raise FetchError(f"{realm.hostname} answered without a token") from error
            self._authorization = f"Bearer {token}"

    def _refusal(self, status: int, what: str) -> FetchError:
        reference = self._reference
        if status in _TRANSIENT_STATUSES:
            return TransientSourceError(f"{self._host} answered {status}")
        if status in (401, 403):
            remedy = (
                f"the credentials in {ENV_OCI_CREDENTIALS} may not read it"
                if self._credentials
                else f"if it is private, set {ENV_OCI_CREDENTIALS} or log in with docker (in an InferenceService: "
                "model.credentialsSecretRef, a Secret of the type kubernetes.io/dockerconfigjson)"
            )
            return FetchError(f"{self._host} refuses {reference} ({status}): check its name; {remedy}")
        if status == 404:
            return FetchError(
                f"{self._host} has no {what} of {reference} (404): correct the repository or the tag"
            )
        return FetchError(f"{self._host} answered {status} to a request for {what} of {reference}")


def _read_bounded(response: httpx2.Response, what: str) -> bytes:
    content = bytearray()
    for piece in response.iter_bytes():
        content += piece
        if len(content) > _MAX_MANIFEST_BYTES:
            raise FetchError(f"{what} is larger than {_MAX_MANIFEST_BYTES} bytes")
    return bytes(content)


def _read_credentials(reference: RegistryReference) -> str | None:
    """Return user and password of the registry in Docker's configuration, as the text of basic authentication.

    Raises ``FetchError`` for a configuration that is malformed; its content is not shown.
    """
    text, where = os.environ.get(ENV_OCI_CREDENTIALS, ""), ENV_OCI_CREDENTIALS
    if not text:
        folder = os.environ.get("DOCKER_CONFIG")
        path = (Path(folder) if folder else Path.home() / ".docker") / "config.json"
        where = str(path)
        try:
            text = path.read_text()
        except OSError:
            return None
    hosts = {reference.registry, *(_DOCKER_HUB if reference.registry in _DOCKER_HUB else ())}
    if reference.endpoint:
        hosts.add(urlsplit(reference.endpoint).netloc)
    try:
        for name, entry in (json.loads(text).get("auths") or {}).items():
            if (
                name.partition("://")[2].partition("/")[0] not in hosts
                and name.partition("/")[0] not in hosts
            ):
                continue
            if entry.get("auth"):
                if b":" not in base64.b64decode(entry["auth"], validate=True):
                    raise ValueError
                return str(entry["auth"])
            if entry.get("username"):
                plain = f"{entry['username']}:{entry['password']}"
                return base64.b64encode(plain.encode()).decode()
    except (ValueError, KeyError, TypeError, AttributeError, binascii.Error) as error:
        raise FetchError(
            f"{where} is not a Docker configuration with auths (its content is not shown)"
        ) from error
    return None
