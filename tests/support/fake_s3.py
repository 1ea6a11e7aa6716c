"""A fake of S3's HTTP API over real sockets, with faults on demand, for the real client obstore.

It serves ``DIRECTORY/BUCKET/KEY``, by path-style addresses, which Google Cloud Storage's XML API has as well. Of a
signature it checks the name of the key; the end-to-end tests have a server that checks all of it.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from fake_source import FakeSource, Seen, SourceHandler, running

LISTING: Final = "listing"


class FakeS3(FakeSource):
    """The server's state. Each delivery of KEY's last part (or "listing") takes one fault from ``faults``."""

    def __init__(self, directory: Path, *, access_key: str | None, bytes_per_second: int) -> None:
        super().__init__()
        self.directory = directory
        self.access_key = access_key
        self.bytes_per_second = bytes_per_second
        self.multipart: set[str] = set()
        """Names of objects whose entity tag is that of an upload in parts, which is no checksum."""
        self.streams = self.most_streams = 0
        self.url = f"http://127.0.0.1:{self.listen(_Handler, 's3')}"

    def deliveries(self, name: str) -> list[Seen]:
        """Return the requests for objects of this name, in order."""
        with self.lock:
            return [seen for seen in self.seen if urlsplit(seen.path).path.endswith(f"/{name}")]


@contextmanager
def running_s3(
    directory: Path, *, access_key: str | None = None, bytes_per_second: int = 0
) -> Iterator[FakeS3]:
    """Run a store for the length of a with-block. ``bytes_per_second`` 0 is unlimited."""
    with running(FakeS3(directory, access_key=access_key, bytes_per_second=bytes_per_second)) as store:
        yield store


@contextmanager
def running_s3_of_environment(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, secret: str = "skiff-secret"
) -> Iterator[FakeS3]:
    """Run a store whose address and keys are in this process's environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKSKIFF")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:1")
    with running_s3(directory, access_key="AKSKIFF") as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        yield store


class _Handler(SourceHandler):
    source: FakeS3
    _is_streaming = False

    def answer(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).strip("/").partition("/")
        wanted = self.source.access_key
        if wanted and f"Credential={wanted}/" not in self.headers.get("Authorization", ""):
            self._refuse(403, "InvalidAccessKeyId")
        elif not (self.source.directory / bucket).is_dir():
            self._refuse(404, "NoSuchBucket")
        elif "list-type" in parse_qs(parts.query):
            self._list(bucket, parse_qs(parts.query).get("prefix", [""])[0])
        else:
            self._deliver(self.source.directory / bucket / key)

    def _list(self, bucket: str, prefix: str) -> None:
        fault = self.source.next_fault(LISTING)
        if fault.status:
            self._refuse(fault.status, "SlowDown")
            return
        root = self.source.directory / bucket
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
        self.send_head(200, {"Content-Type": "application/xml", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _tag(self, path: Path) -> str:
        digest = hashlib.md5(path.read_bytes()).hexdigest()
        return f'"{digest}-2"' if path.name in self.source.multipart else f'"{digest}"'

    def _deliver(self, path: Path) -> None:
        if not path.is_file():
            self._refuse(404, "NoSuchKey")
            return
        fault = self.source.next_fault(path.name)
        if fault.status:
            self._refuse(fault.status, "AccessDenied" if fault.status == 403 else "InternalError")
            return
        tag, content = self._tag(path), path.read_bytes()
        if self.headers.get("If-Match", tag) != tag:
            self._refuse(412, "PreconditionFailed")
            return
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(content))
        body = content[start:stop]
        self.send_head(
            206,
            {
                "ETag": tag,
                "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT",
                "Content-Range": f"bytes {start}-{stop - 1}/{len(content)}",
                "Content-Length": str(len(body)),
            },
        )
        with self.source.lock:
            self.source.streams += 1
            self.source.most_streams = max(self.source.most_streams, self.source.streams)
        self._is_streaming = True
        try:
            self.send_body(body, fault)
        finally:
            self.end_stream()

    def end_stream(self) -> None:
        if self._is_streaming:
            self._is_streaming = False
            with self.source.lock:
                self.source.streams -= 1

    def _refuse(self, status: int, code: str) -> None:
        key = self.source.access_key or ""
        body = f"<Error><Code>{code}</Code><AWSAccessKeyId>{key}</AWSAccessKeyId></Error>".encode()
        self.send_head(status, {"Content-Type": "application/xml", "Content-Length": str(len(body))})
        self.wfile.write(body)
