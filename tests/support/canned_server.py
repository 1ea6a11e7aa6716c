"""An HTTP server with canned responses of the streaming API, for tests of clients.

The text of the prompt or of the last message selects the response: ``cut`` drops the connection midway, ``busy`` is a
429, ``broken`` sends an error event, ``slow`` waits a minute between two tokens, ``think`` begins with reasoning, ``start``
with the comments of a router that waits for a pod; any other text is answered with ``max_tokens`` (default 5) words.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

MODEL: Final = "canned"
DEFAULT_WORDS: Final = 5
SLOW_SECONDS: Final = 60.0


class CannedServer(ThreadingHTTPServer):
    """``bodies`` are the requests so far; ``hung_up`` is set once a client has disconnected during a response."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str] = []
        self.connections = 0
        self.hung_up = threading.Event()
        self.token_seconds = 0.0

    @property
    def url(self) -> str:
        """The server's base URL."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections += 1
        super().process_request(request, client_address)


@contextmanager
def canned_server() -> Iterator[CannedServer]:
    """Run a server for the length of a with-block."""
    server = CannedServer()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: CannedServer

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        self._json(200, {"object": "list", "data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        self.server.authorizations.append(self.headers.get("Authorization", ""))
        script = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        if script == "busy":
            self._json(429, {"error": {"message": "too many requests\nwait already"}})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._stream(body, script, chat="messages" in body)
        except OSError:
            self.server.hung_up.set()
            self.close_connection = True

    def _stream(self, body: dict[str, Any], script: object, *, chat: bool) -> None:
        count = body.get("max_tokens", DEFAULT_WORDS)
        if script == "think":
            self._event({"choices": [{"delta": {"reasoning_content": "hmm"}}]})
        if script == "start":
            self._chunk(b": waiting for a pod\n\n:\n\n: loading\x1b[2J weights 43%\n\n")
        for index in range(count):
            self._word(f"w{index} ", chat)
            if script == "cut" and index == 1:
                self.close_connection = True
                return
            if script == "broken" and index == 1:
                self._event({"error": {"message": "the engine failed"}})
                break
            self._pause(SLOW_SECONDS if script == "slow" and index == 1 else self.server.token_seconds)
        if body.get("stream_options"):
            self._event(
                {
                    "choices": [],
                    "usage": {"prompt_tokens": len(body.get("prompt", "")), "completion_tokens": count},
                }
            )
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _word(self, word: str, chat: bool) -> None:
        self._event({"choices": [{"delta": {"content": word}} if chat else {"text": word}]})

    def _pause(self, seconds: float) -> None:
        """Wait, and raise ``ConnectionError`` as soon as the client disconnects."""
        if not seconds:
            return
        self.connection.settimeout(seconds)
        try:
            if self.connection.recv(1) == b"":
                raise ConnectionError("the client has disconnected")
        except TimeoutError:
            pass
        finally:
            self.connection.settimeout(None)

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def _json(self, status: int, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
