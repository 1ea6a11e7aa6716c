"""A fake of the hub's HTTP API over real sockets, with faults on demand, for the real client huggingface_hub.

It serves ``DIRECTORY/ORG/NAME/*`` as models. Large files are redirected to a second server, as by the real hub; Xet is
not supported. It is also a program, for pods that fetch from it::

    python tests/support/fake_hub.py --directory DIR --host 0.0.0.0 --port 8900
"""

import argparse
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from fake_source import CHUNK_BYTES, FakeSource, Fault, Seen, SourceHandler, running

LARGE_BYTES: Final = 10_000


class FakeHub(FakeSource):
    """The state that both servers share. Each delivery of NAME (or "listing") takes one fault from ``faults[NAME]``."""

    def __init__(
        self, directory: Path, *, host: str, port: int, token: str | None, bytes_per_second: int
    ) -> None:
        super().__init__()
        self.directory = directory
        self.token = token
        self.bytes_per_second = bytes_per_second
        self.port = self.listen(_Handler, "hub", host, port)
        self.storage_port = self.listen(_Handler, "storage", host)
        self.url = f"http://{host}:{self.port}"

    def deliveries(self, name: str) -> list[Seen]:
        """Return the requests for the content of ``name``, in order; for a large file, those to the storage."""
        with self.lock:
            found = [seen for seen in self.seen if seen.method == "GET" and _file_of(seen) == name]
        return [seen for seen in found if seen.server == "storage"] or found

    def model(self, model_id: str) -> Path | None:
        """Return the directory of a model, or None."""
        path = self.directory / model_id
        return path if path.is_dir() and model_id.count("/") == 1 and ".." not in model_id else None


@contextmanager
def running_hub(
    directory: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    bytes_per_second: int = 0,
) -> Iterator[FakeHub]:
    """Run a hub for the length of a with-block. ``bytes_per_second`` 0 is unlimited."""
    with running(
        FakeHub(directory, host=host, port=port, token=token, bytes_per_second=bytes_per_second)
    ) as hub:
        yield hub


def _file_of(seen: Seen) -> str:
    """Return the name of the file that a request is for: /ORG/NAME/resolve/COMMIT/FILE on the hub, /ORG/NAME/FILE."""
    parts = unquote(urlsplit(seen.path).path).strip("/").split("/")
    return "/".join(parts[4:] if parts[2:3] == ["resolve"] else parts[2:])


def _is_beginning(seen: Seen) -> bool:
    return seen.headers.get("range", "bytes=0-").startswith("bytes=0-")


def commit_of(model: Path) -> str:
    """Return a commit hash that depends on the model's files alone."""
    digest = hashlib.sha1()
    for path in _files(model):
        digest.update(f"{path.relative_to(model)}\0{_digests(path).blob_id}\n".encode())
    return digest.hexdigest()


def _files(model: Path) -> list[Path]:
    return sorted(path for path in model.rglob("*") if path.is_file())


class Digests(NamedTuple):
    """The checksums of a file by which the hub names it."""

    blob_id: str
    sha256: str


def _digests(path: Path) -> Digests:
    state = path.stat()
    return _cached_digests(path, state.st_size, state.st_mtime_ns)


@cache
def _cached_digests(path: Path, size: int, _mtime_ns: int) -> Digests:
    blob_id, sha256 = hashlib.sha1(f"blob {size}\0".encode()), hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            blob_id.update(chunk)
            sha256.update(chunk)
    return Digests(blob_id.hexdigest(), sha256.hexdigest())


def _blob_id(content: bytes) -> str:
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def _sibling(model: Path, path: Path) -> dict[str, Any]:
    size, digests = path.stat().st_size, _digests(path)
    entry: dict[str, Any] = {"rfilename": str(path.relative_to(model)), "size": size}
    if size < LARGE_BYTES:
        return {**entry, "blobId": digests.blob_id}
    pointer = (
        f"version https://git-lfs.github.com/spec/v1\noid sha256:{digests.sha256}\nsize {size}\n".encode()
    )
    stored = {"sha256": digests.sha256, "size": size, "pointerSize": len(pointer)}
    return {**entry, "blobId": _blob_id(pointer), "lfs": stored}


class _Handler(SourceHandler):
    source: FakeHub

    def answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if self.server_name == "storage":
            self._deliver(self.source.directory / "/".join(parts), {})
        elif self._is_welcome():
            self._route(parts)

    def _is_welcome(self) -> bool:
        token = self.source.token
        if token is None or self.headers.get("Authorization") == f"Bearer {token}":
            return True
        self._refuse(401, "GatedRepo")
        return False

    def _route(self, parts: list[str]) -> None:
        if parts == ["deliveries"]:
            self._count_deliveries()
        elif parts[:2] == ["api", "models"] and parts[4:5] == ["revision"]:
            self._listing("/".join(parts[2:4]), "/".join(parts[5:]))
        elif len(parts) >= 5 and parts[2] == "resolve" and ".." not in parts:
            self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._refuse(404, "")

    def _count_deliveries(self) -> None:
        """Answer with the number of times that each file was delivered from its beginning: its ranges count as one."""
        with self.source.lock:
            names = {
                _file_of(seen)
                for seen in self.source.seen
                if seen.server == "storage" or "/resolve/" in seen.path
            }
        counts = {name: sum(_is_beginning(seen) for seen in self.source.deliveries(name)) for name in names}
        body = json.dumps(counts).encode()
        self.send_head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _listing(self, model_id: str, revision: str) -> None:
        model = self._model_at(model_id, revision)
        fault = self.source.next_fault("listing")
        if fault.status:
            self._refuse(fault.status, "", fault.headers)
        elif model is not None:
            siblings = [_sibling(model, path) for path in _files(model)]
            body = (
                fault.body
                or json.dumps({"id": model_id, "sha": commit_of(model), "siblings": siblings}).encode()
            )
            self.send_head(200, {"Content-Type": "application/json", "Content-Length": str(len(body))})
            self.wfile.write(body)

    def _model_at(self, model_id: str, revision: str) -> Path | None:
        model = self.source.model(model_id)
        if model is None:
            self._refuse(404, "RepoNotFound")
        elif revision not in ("main", commit_of(model)):
            self._refuse(404, "RevisionNotFound")
        else:
            return model
        return None

    def _file(self, model_id: str, revision: str, name: str) -> None:
        model = self._model_at(model_id, revision)
        if model is None:
            return
        path = model / name
        if not path.is_file():
            self._refuse(404, "EntryNotFound")
            return
        size = path.stat().st_size
        commit = {"X-Repo-Commit": commit_of(model)}
        if size < LARGE_BYTES:
            self._deliver(path, commit)
            return
        host = (self.headers.get("Host") or "127.0.0.1").rpartition(":")[0]
        location = f"http://{host}:{self.source.storage_port}/{model_id}/{name}?signature=secret"
        linked = {
            "X-Linked-Etag": f'"{_digests(path).sha256}"',
            "X-Linked-Size": str(size),
        }
        self.send_head(302, {"Location": location, **commit, **linked, "Content-Length": "0"})

    def _deliver(self, path: Path, extra: dict[str, str]) -> None:
        size = path.stat().st_size
        headers = {"ETag": f'"{_digests(path).blob_id}"', "Accept-Ranges": "bytes", **extra}
        if self.command == "HEAD":
            self.send_head(200, {**headers, "Content-Length": str(size)})
            return
        fault = self.source.next_fault("/".join(path.relative_to(self.source.directory).parts[2:]))
        if fault.status:
            self._refuse(fault.status, "", fault.headers)
            return
        start, stop = (0, size) if fault.ignore_range else self._range(size)
        if start >= size > 0:
            self._refuse(416, "")
            return
        is_part = stop - start < size
        if is_part:
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        self.send_head(206 if is_part else 200, {**headers, "Content-Length": str(stop - start)})
        self._send(path, start, stop, fault)

    def _range(self, size: int) -> tuple[int, int]:
        first, _, last = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")
        return int(first), min(size, int(last) + 1) if last else size

    def _send(self, path: Path, start: int, stop: int, fault: Fault) -> None:
        if fault.cut_after_bytes is not None:
            stop = min(stop, start + fault.cut_after_bytes)
            self.close_connection = True
        with path.open("rb", buffering=0) as stream:
            stream.seek(start)
            if fault.corrupt:
                self.wfile.write(bytes([stream.read(1)[0] ^ 0xFF]))
            with suppress(OSError):  # the client has gone
                while (left := stop - stream.tell()) > 0:
                    count = min(left, CHUNK_BYTES) if self.source.bytes_per_second else left
                    self.connection.sendfile(stream, stream.tell(), count)
                    if self.source.bytes_per_second:
                        time.sleep(count / self.source.bytes_per_second)

    def _refuse(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        extra = {"X-Error-Code": code} if code else {}
        self.send_head(status, {"Content-Length": "0", **extra, **(headers or {})})


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="holds ORG/NAME/ directories")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", default=None, help="refuse requests that do not carry it")
    parser.add_argument("--bytes-per-second", type=int, default=0, help="slow down each delivery")
    given = parser.parse_args()
    with running_hub(
        given.directory,
        host=given.host,
        port=given.port,
        token=given.token,
        bytes_per_second=given.bytes_per_second,
    ) as hub:
        print(f"serving {given.directory} at port {hub.port}", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
