"""A fake of an OCI registry over real sockets, with faults on demand: tokens, redirects to a storage, ranges or none.

The end-to-end tests have the real one of the distribution project.
"""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from fake_source import FakeSource, Fault, Seen, SourceHandler, running

MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
TITLE: Final = "org.opencontainers.image.title"
USER: Final = "reader:password-of-reader"
TOKEN: Final = "token-of-reader"


def digest_of(content: bytes) -> str:
    """Return the digest of a blob."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class FakeRegistry(FakeSource):
    """The state of registry and storage. Each delivery of a blob or manifest takes one fault from ``faults[NAME]``."""

    def __init__(self, *, private: bool, redirects: bool, ranges: bool) -> None:
        super().__init__()
        self.private, self.redirects, self.ranges = private, redirects, ranges
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.names: dict[str, str] = {}
        self.port, self.storage_port = (self.listen(_Handler, name) for name in ("registry", "storage"))
        self.host = f"localhost:{self.port}"

    def push(self, reference: str, layers: list[dict[str, Any]], **manifest: Any) -> str:
        """Store an artifact under REPOSITORY:TAG, and return its digest. A layer has ``content`` and fields of its own."""
        descriptors = []
        for layer in layers:
            content = layer.pop("content")
            self.blobs[digest_of(content)] = content
            name = layer.get("annotations", {}).get(TITLE, "")
            self.names[digest_of(content)] = name
            descriptors.append({"digest": digest_of(content), "size": len(content), **layer})
        body = {"schemaVersion": 2, "mediaType": MANIFEST_TYPE, "layers": descriptors, **manifest}
        text = json.dumps(body).encode()
        repository, _, tag = reference.partition(":")
        for version in (tag, digest_of(text)):
            self.manifests[f"{repository}:{version}"] = text
        return digest_of(text)

    def deliveries(self, name: str) -> list[Seen]:
        """Return the requests that got content of the layer of this title."""
        digests = [digest for digest, each in self.names.items() if each == name]
        server = "storage" if self.redirects else "registry"
        with self.lock:
            return [
                seen
                for seen in self.seen
                if seen.server == server and seen.path.partition("?")[0].endswith(tuple(digests))
            ]


@contextmanager
def running_registry(
    *, private: bool = False, redirects: bool = False, ranges: bool = True
) -> Iterator[FakeRegistry]:
    """Run a registry for the length of a with-block."""
    with running(FakeRegistry(private=private, redirects=redirects, ranges=ranges)) as registry:
        yield registry


class _Handler(SourceHandler):
    source: FakeRegistry

    def answer(self) -> None:
        parts = urlsplit(self.path)
        if parts.path == "/token":
            self._token(parse_qs(parts.query))
        elif self.server_name == "storage":
            self._deliver(parts.path.strip("/"))
        elif self.source.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            realm = f"http://localhost:{self.source.port}/token"
            challenge = f'Bearer realm="{realm}",service="registry",scope="repository:org/llama:pull"'
            self._answer(401, b"", {"WWW-Authenticate": challenge})
        else:
            repository, kind, version = parts.path.removeprefix("/v2/").rsplit("/", 2)
            if kind == "manifests":
                self._manifest(f"{repository}:{version}")
            elif self.source.redirects:
                storage = f"http://127.0.0.1:{self.source.storage_port}/{version}?signature=secret"
                self._answer(307, b"", {"Location": storage})
            else:
                self._deliver(version)

    def _token(self, query: dict[str, list[str]]) -> None:
        known = self.headers.get("Authorization") == f"Basic {base64.b64encode(USER.encode()).decode()}"
        if known and query["scope"] == ["repository:org/llama:pull"]:
            self._answer(200, json.dumps({"token": TOKEN}).encode())
        else:
            self._answer(401, b"")

    def _manifest(self, key: str) -> None:
        fault, content = self.source.next_fault("manifest"), self.source.manifests.get(key)
        if fault.status or content is None:
            self._answer(fault.status or 404, b"")
        else:
            self._answer(200, fault.body or content, {"Content-Type": MANIFEST_TYPE})

    def _deliver(self, digest: str) -> None:
        wanted = self.headers.get("Range")
        is_probe = wanted == "bytes=1-1"
        fault = Fault() if is_probe else self.source.next_fault(self.source.names[digest])
        if fault.status:
            self._answer(fault.status, b"")
            return
        content = self.source.blobs[digest]
        start, stop, status, headers = 0, len(content), 200, {}
        if wanted and self.source.ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), int(last) + 1, 206
            headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        self._answer(status, content[start:stop], headers, fault)

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, fault: Fault | None = None
    ) -> None:
        self.send_head(status, {**(headers or {}), "Content-Length": str(len(body))})
        self.send_body(body, fault or Fault())
