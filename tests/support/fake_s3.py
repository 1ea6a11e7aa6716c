"""A fake of S3's HTTP API over real sockets, with faults on demand, for the real client obstore.

It serves ``DIRECTORY/BUCKET/KEY``, by path-style addresses, which Google Cloud Storage's XML API has as well. Of a
signature it checks the name of the key; the end-to-end tests have a server that checks all of it.
"""

import hashlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from fake_hub import CHUNK_BYTES, Fault, Seen

LISTING: Final = "listing"


class FakeS3:
    """The server's state. Each delivery of KEY's last part (or "listing") takes one fault from ``faults``."""

    def __init__(self, directory: Path, *, access_key: str | None, bytes_per_second: int) -> None:
        self.directory = directory
        self.access_key = access_key
        self.bytes_per_second = bytes_per_second
        self.multipart: set[str] = set()
        """Names of objects whose entity tag is that of an upload in parts, which is no checksum."""
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.seen: list[Seen] = []
        self.lock = threading.Lock()
        self.streams = self.most_streams = 0
        handler = type("Handler", (_Handler,), {"store": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> None:
        """Serve from threads of this process."""
        serve = self._server.serve_forever
        threading.Thread(target=serve, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def deliveries(self, name: str) -> list[Seen]:
        """Return the requests for objects of this name, in order."""
        with self.lock:
            return [seen for seen in self.seen if urlsplit(seen.path).path.endswith(f"/{name}")]

    def next_fault(self, name: str) -> Fault:
        """Return the next fault for a delivery; a fault without effect if there is none left."""
        with self.lock:
            return self.faults[name].pop(0) if self.faults[name] else Fault()


@contextmanager
def running_s3(
    directory: Path, *, access_key: str | None = None, bytes_per_second: int = 0
) -> Iterator[FakeS3]:
    """Run a store for the length of a with-block. ``bytes_per_second`` 0 is unlimited."""
    store = FakeS3(directory, access_key=access_key, bytes_per_second=bytes_per_second)
    store.start()
    try:
        yield store
    finally:
        store.stop()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: FakeS3

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the tests read ``seen``."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).strip("/").partition("/")
        with self.store.lock:
            headers = {name.lower(): value for name, value in self.headers.items()}
            self.store.seen.append(Seen("s3", self.command, self.path, headers))
        wanted = self.store.access_key
        if wanted and f"Credential={wanted}/" not in self.headers.get("Authorization", ""):
            self._refuse(403, "InvalidAccessKeyId")
        elif not (self.store.directory / bucket).is_dir():
            self._refuse(404, "NoSuchBucket")
        elif "list-type" in parse_qs(parts.query):
            self._list(bucket, parse_qs(parts.query).get("prefix", [""])[0])
        else:
            self._deliver(self.store.directory / bucket / key)

    def _list(self, bucket: str, prefix: str) -> None:
        fault = self.store.next_fault(LISTING)
        if fault.status:
            self._refuse(fault.status, "SlowDown")
            return
        root = self.store.directory / bucket
        entries = []
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            key = str(path.relative_to(root))
            if key.startswith(prefix):
                entries.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{self._tag(path)}</ETag><Size>{path.stat().st_size}</Size></Contents>"
                )
        body = (
            f"<ListBucketResult><Name>{bucket}</Name><IsTruncated>false</IsTruncated>"
            f"{''.join(entries)}</ListBucketResult>"
        ).encode()
        self._head(200, {"Content-Type": "application/xml", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _tag(self, path: Path) -> str:
        digest = hashlib.md5(path.read_bytes()).hexdigest()
        return f'"{digest}-2"' if path.name in self.store.multipart else f'"{digest}"'

    def _deliver(self, path: Path) -> None:
        if not path.is_file():
            self._refuse(404, "NoSuchKey")
            return
        fault = self.store.next_fault(path.name)
        if fault.status:
            self._refuse(fault.status, "AccessDenied" if fault.status == 403 else "InternalError")
            return
        tag, content = self._tag(path), path.read_bytes()
        if self.headers.get("If-Match", tag) != tag:
            self._refuse(412, "PreconditionFailed")
            return
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(content))
        body = bytearray(content[start:stop])
        if fault.corrupt:
            body[0] ^= 0xFF
        self._head(
            206,
            {
                "ETag": tag,
                "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
                "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}",
                "Content-Length": str(len(body)),
            },
        )
        with self.store.lock:
            self.store.streams += 1
            self.store.most_streams = max(self.store.most_streams, self.store.streams)
        try:
            self._send(bytes(body), fault.cut_after_bytes)
        finally:
            with self.store.lock:
                self.store.streams -= 1

    def _send(self, body: bytes, cut_after_bytes: int | None) -> None:
        body = body if cut_after_bytes is None else body[:cut_after_bytes]
        for start in range(0, len(body), CHUNK_BYTES):
            chunk = body[start : start + CHUNK_BYTES]
            try:
                self.wfile.write(chunk)
            except OSError:
                break
            if self.store.bytes_per_second:
                time.sleep(len(chunk) / self.store.bytes_per_second)
        if cut_after_bytes is not None:
            self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        key = self.store.access_key or ""
        body = f"<Error><Code>{code}</Code><AWSAccessKeyId>{key}</AWSAccessKeyId></Error>".encode()
        self._head(status, {"Content-Type": "application/xml", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
