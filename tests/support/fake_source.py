"""The parts that fakes of model sources share: faults of deliveries, requests as they arrived, and servers in threads."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, TypeVar

CHUNK_BYTES: Final = 16 << 10


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of one delivery of a file or of the listing."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut_after_bytes: int | None = None
    corrupt: bool = False
    body: bytes | None = None
    ignore_range: bool = False
    before: Callable[[], object] | None = None
    """Called before the content is read."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A request as it arrived. ``server`` is the name of one of the source's servers."""

    server: str
    method: str
    path: str
    headers: dict[str, str]


class FakeSource:
    """The state that the servers of a source share. Each delivery of NAME takes one fault from ``faults[NAME]``."""

    bytes_per_second = 0

    def __init__(self) -> None:
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.seen: list[Seen] = []
        self.lock = threading.Lock()
        self._servers: list[ThreadingHTTPServer] = []

    def listen(
        self, handler: type["SourceHandler"], name: str, host: str = "127.0.0.1", port: int = 0
    ) -> int:
        """Add a server of this name, and return its port."""
        bound = type("Handler", (handler,), {"source": self, "server_name": name})
        server = ThreadingHTTPServer((host, port), bound)
        server.daemon_threads = True
        self._servers.append(server)
        return int(server.server_address[1])

    def start(self) -> None:
        """Serve from threads of this process."""
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def stop(self) -> None:
        """Stop listening."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def next_fault(self, name: str) -> Fault:
        """Return the next fault for a delivery, once its ``before`` was called; one without effect if none is left."""
        with self.lock:
            fault = self.faults[name].pop(0) if self.faults[name] else Fault()
        if fault.before:
            fault.before()
        return fault


S = TypeVar("S", bound=FakeSource)


@contextmanager
def running(source: S) -> Iterator[S]:
    """Run a source for the length of a with-block."""
    source.start()
    try:
        yield source
    finally:
        source.stop()


class SourceHandler(BaseHTTPRequestHandler):
    """A handler that records requests, and sends bodies with the faults of a delivery."""

    protocol_version = "HTTP/1.1"
    source: FakeSource
    server_name: str

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the tests read ``seen``."""

    def do_GET(self) -> None:
        headers = {key.lower(): value for key, value in self.headers.items()}
        with self.source.lock:
            self.source.seen.append(Seen(self.server_name, self.command, self.path, headers))
        self.answer()

    def do_HEAD(self) -> None:
        self.do_GET()

    def answer(self) -> None:
        """Answer the request that was recorded."""
        raise NotImplementedError

    def send_head(self, status: int, headers: dict[str, str]) -> None:
        """Send the status and the headers."""
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def end_stream(self) -> None:
        """Called before the last bytes of a body are sent; a fake that counts streams overrides it."""

    def send_body(self, content: bytes, fault: Fault) -> None:
        """Send the content, damaged or cut off as the fault says, no faster than the source may."""
        body = bytearray(content)
        if fault.corrupt:
            body[0] ^= 0xFF
        sent = body[: fault.cut_after_bytes]
        for start in range(0, len(sent), CHUNK_BYTES):
            chunk = sent[start : start + CHUNK_BYTES]
            if self.source.bytes_per_second:
                time.sleep(len(chunk) / self.source.bytes_per_second)
            if start + CHUNK_BYTES >= len(sent):
                self.end_stream()  # after the last chunk, the client may have begun its next request
            try:
                self.wfile.write(chunk)
            except OSError:
                break
        if fault.cut_after_bytes is not None:
            self.close_connection = True
