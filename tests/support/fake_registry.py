"""A fake of an OCI registry over real sockets, with faults on demand: tokens, redirects to a storage, ranges or none.

The end-to-end tests have the real one of the distribution project.
"""

import base64
import hashlib
import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from fake_hub import Fault, Seen

MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
TITLE: Final = "org.opencontainers.image.title"
USER: Final = "reader:password-of-reader"
TOKEN: Final = "token-of-reader"


def digest_of(content: bytes) -> str:
    """Return the digest of a blob."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class FakeRegistry:
    """The state of registry and storage. Each delivery of a blob or manifest takes one fault from ``faults[NAME]``."""

    def __init__(self, *, private: bool, redirects: bool, ranges: bool) -> None:
        self.private, self.redirects, self.ranges = private, redirects, ranges
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, bytes] = {}
        self.names: dict[str, str] = {}
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.seen: list[Seen] = []
        self.lock = threading.Lock()
        self._servers = [_server(self, "registry"), _server(self, "storage")]
        self.port, self.storage_port = (server.server_address[1] for server in self._servers)
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

    def start(self) -> None:
        """Serve from threads of this process."""
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

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

    def next_fault(self, name: str) -> Fault:
        """Return the next fault for a delivery; a fault without effect if there is none left."""
        with self.lock:
            return self.faults[name].pop(0) if self.faults[name] else Fault()


@contextmanager
def running_registry(
    *, private: bool = False, redirects: bool = False, ranges: bool = True
) -> Iterator[FakeRegistry]:
    """Run a registry for the length of a with-block."""
    registry = FakeRegistry(private=private, redirects=redirects, ranges=ranges)
    registry.start()
    try:
        yield registry
    finally:
        registry.stop()


def _server(registry: FakeRegistry, name: str) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"registry": registry, "server_name": name})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    return server


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    registry: FakeRegistry
    server_name: str

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the tests read ``seen``."""

    def do_GET(self) -> None:
        with self.registry.lock:
            headers = {key.lower(): value for key, value in self.headers.items()}
            self.registry.seen.append(Seen(self.server_name, self.command, self.path, headers))
        parts = urlsplit(self.path)
        if parts.path == "/token":
            self._token(parse_qs(parts.query))
        elif self.server_name == "storage":
            self._deliver(parts.path.strip("/"))
        elif self.registry.private and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            realm = f"http://localhost:{self.registry.port}/token"
            challenge = f'Bearer realm="{realm}",service="registry",scope="repository:org/llama:pull"'
            self._answer(401, b"", {"WWW-Authenticate": challenge})
        else:
            repository, kind, version = parts.path.removeprefix("/v2/").rsplit("/", 2)
            if kind == "manifests":
                self._manifest(f"{repository}:{version}")
            elif self.registry.redirects:
                storage = f"http://127.0.0.1:{self.registry.storage_port}/{version}?signature=secret"
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
        fault, content = self.registry.next_fault("manifest"), self.registry.manifests.get(key)
        if fault.status or content is None:
            self._answer(fault.status or 404, b"")
        else:
            self._answer(200, fault.body or content, {"Content-Type": MANIFEST_TYPE})

    def _deliver(self, digest: str) -> None:
        content = self.registry.blobs[digest]
        wanted = self.headers.get("Range")
        is_probe = wanted == "bytes=1-1"
        fault = Fault() if is_probe else self.registry.next_fault(self.registry.names[digest])
        if fault.status:
            self._answer(fault.status, b"")
            return
        start, stop, status, headers = 0, len(content), 200, {}
        if wanted and self.registry.ranges:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop, status = int(first), int(last) + 1, 206
            headers = {"Content-Range": f"bytes {start}-{stop - 1}/{len(content)}"}
        body = bytearray(content[start:stop])
        if fault.corrupt:
            body[0] ^= 0xFF
        self._answer(status, bytes(body), headers, fault.cut_after_bytes)

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body[:cut])
        if cut is not None:
            self.close_connection = True
