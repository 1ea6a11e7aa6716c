"""Request framing on one connection: each byte belongs to one request, and each request gets one response."""

import json
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest
from frontend import NAME, TIMEOUT_SECONDS, Echo, running_frontend, write_model
from h11_responses import StrictReply, read_replies, read_reply
from malformed_http import BROKEN_CHUNKS, BROKEN_HEADS
from raw_http import Address, address_of

from skiff_runtime.api.http.protocol import MAX_PIPELINED_REQUESTS

ID: Final = "x-request-id: mine\r\n"
GET: Final = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-request-id: second\r\n\r\n"
LAST: Final = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-request-id: last\r\nconnection: close\r\n\r\n"
COMPLETION: Final = {"model": NAME, "prompt": "hello world", "max_tokens": 20}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    """Run frontend processes with a rank that echoes each prompt."""
    model: Path = write_model(tmp_path_factory.mktemp("model"))
    with running_frontend(model) as front:
        echo = Echo(front.rank)
        echo.start()
        yield address_of(front.url)
        echo.stop()


CHUNKED: Final = "transfer-encoding: chunked"


def connect(address: Address) -> socket.socket:
    return socket.create_connection(address, TIMEOUT_SECONDS)


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join(
        [f"{method} {path} HTTP/1.1", "host: localhost", "x-request-id: mine", *lines, "", ""]
    ).encode()


def completion(*lines: str, stream: bool = False) -> bytes:
    """Return a whole completion request."""
    body = json.dumps({**COMPLETION, "stream": stream}).encode()
    return head("POST", "/v1/completions", f"content-length: {len(body)}", *lines) + body


def talk(address: Address, *pieces: bytes, methods: tuple[str, ...] = ("POST",)) -> list[StrictReply]:
    """Send ``pieces``. Return every response up to the end of the connection, which the server must close."""
    with closing(connect(address)) as connection:
        for piece in pieces:
            connection.sendall(piece)
        return read_replies(connection, methods)


def assert_rejected(
    reply: StrictReply, status: int, request_id: str | None = "mine", *, bodiless: bool = False
) -> None:
    """Assert that ``reply`` is an error in OpenAI's shape after which the connection ends."""
    assert reply.status == status, reply
    if not bodiless:
        error = json.loads(reply.body)["error"]
        assert error["message"] and {"type", "param", "code"} < set(error)
    assert reply.headers["connection"] == "close" and "x-request-id" in reply.headers
    assert request_id in (None, reply.headers["x-request-id"])


@pytest.mark.parametrize("path", ["/nowhere", "/v1/models", "/v1/completions"])
def test_body_after_early_response_is_never_a_request(address: Address, path: str) -> None:
    lines = ["x-request-timeout-seconds: none"] if path == "/v1/completions" else []
    smuggled = head("GET", "/v1/models")
    smuggled = head("GET", "/v1/models", f"pad: {'x' * (94 - len(smuggled))}")
    body = b"\r\nupgrade: x" * (len(smuggled) // 10) + smuggled
    with closing(connect(address)) as connection:
        connection.sendall(head("POST", path, f"content-length: {len(body)}", *lines))
        first = read_reply(connection, "POST")
        connection.sendall(body)
        rest = read_replies(connection, ("GET",))
    assert first.status in (400, 404, 405) and first.headers["x-request-id"] == "mine"
    assert rest == []


def test_long_body_after_early_response_gets_no_second_response(address: Address) -> None:
    with closing(connect(address)) as connection:
        connection.sendall(head("POST", "/nowhere", "content-length: 200000"))
        assert read_reply(connection, "POST").status == 404
        for _ in range(10):
            connection.sendall(b"x" * 20_000)
        assert read_replies(connection, ("POST",)) == []


def test_end_of_head_and_body_in_one_piece(address: Address) -> None:
    body = b'{"a":\r\nupgrade: 1}'
    with closing(connect(address)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start = head("POST", "/v1/completions", f"content-length: {len(body)}")
        connection.sendall(start[:-2])
        assert_quiet(connection)
        connection.sendall(start[-2:] + body)
        reply = read_reply(connection, "POST")
        assert reply.status == 400 and "JSON" in json.loads(reply.body)["error"]["message"]
        connection.sendall(LAST)
        assert [each.status for each in read_replies(connection, ("GET",))] == [200]


def assert_quiet(connection: socket.socket) -> None:
    """Assert that nothing arrives for a moment."""
    connection.settimeout(0.1)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.settimeout(TIMEOUT_SECONDS)


@pytest.mark.parametrize(("status", "line", "rest"), BROKEN_HEADS)
def test_ambiguous_head_is_rejected(address: Address, status: int, line: str, rest: str) -> None:
    request = f"{line}\r\n{ID}host: localhost\r\n{rest}".encode("latin-1")
    [reply] = talk(address, request + GET, methods=(line.partition(" ")[0],))
    first_line_is_broken = status in (400, 505) and line.startswith("GET")
    assert_rejected(reply, status, None if first_line_is_broken else "mine", bodiless=line.startswith("HEAD"))


@pytest.mark.parametrize("chunks", BROKEN_CHUNKS)
def test_malformed_chunk_is_rejected(address: Address, chunks: bytes) -> None:
    [reply] = talk(address, head("POST", "/v1/completions", CHUNKED) + chunks + GET)
    assert_rejected(reply, 400)


@pytest.mark.parametrize("lines", ["", "host: a b\r\n", "host: localhost\r\nhost: localhost\r\n"])
def test_request_without_exactly_one_valid_host_is_rejected(address: Address, lines: str) -> None:
    [reply] = talk(address, f"GET /v1/models HTTP/1.1\r\n{ID}{lines}\r\n".encode() + GET)
    assert_rejected(reply, 400)


def test_absolute_target_of_same_host_is_served(address: Address) -> None:
    first = b"GET http://LOCALHOST/v1/models?a=b HTTP/1.1\r\nhost: localhost\r\n\r\n"
    second = b"GET http://localhost HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"  # the home page
    replies = talk(address, first + second, methods=("GET", "GET"))
    assert [each.status for each in replies] == [200, 200]


@pytest.mark.parametrize("closing_trailer", ["", "connection: close\r\n"])
def test_trailers_are_not_headers(address: Address, closing_trailer: str) -> None:
    body = json.dumps(COMPLETION).encode()
    trailers = f"x-request-id: forged\r\nx-request-timeout-seconds: none\r\n{closing_trailer}".encode()
    chunks = b"%x;name=value\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)
    replies = talk(address, head("POST", "/v1/completions", CHUNKED) + chunks + LAST, methods=("POST", "GET"))
    served = [(200, "mine"), (200, "last")]
    assert [(each.status, each.headers["x-request-id"]) for each in replies] == served[
        : 1 if closing_trailer else 2
    ]
    assert replies[-1].headers["connection"] == "close"


@pytest.mark.parametrize(("version", "chunked"), [("1.0", False), ("1.1", False), ("1.1", True)])
def test_upgrade_offer_is_ignored_at_any_split(address: Address, version: str, chunked: bool) -> None:
    body = json.dumps({**COMPLETION, "prompt": "GET / HTTP/1.1"}).encode()
    framing = CHUNKED if chunked else f"content-length: {len(body)}"
    offer = head("POST", "/v1/completions", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", framing)
    request = offer.replace(b"HTTP/1.1", f"HTTP/{version}".encode(), 1)
    request += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    for cut in (1, len(offer) - 2, len(offer) + 5):
        again = request + LAST if version == "1.1" else b""
        pieces = request[:cut], request[cut:] + again
        replies = talk(address, *pieces, methods=("POST", "POST", "GET"))
        assert [each.status for each in replies] == ([200] if version == "1.0" else [200, 200, 200])
        assert all(each.headers["x-request-id"] in ("mine", "last") for each in replies)


@pytest.mark.parametrize("lines", [(), ("connection: keep-alive",), ("expect: 100-continue",)])
def test_http_1_0_response_is_not_chunked(address: Address, lines: tuple[str, ...]) -> None:
    old = completion(*lines, stream=True).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    [reply] = talk(address, old + GET)
    assert reply.status == 200 and "transfer-encoding" not in reply.headers and reply.interim == 0
    assert reply.headers["connection"] == "close"
    assert reply.body.startswith(b"data: {") and reply.body.endswith(b"data: [DONE]\n\n")
    [whole] = talk(address, completion().replace(b"HTTP/1.1", b"HTTP/1.0", 1))
    assert int(whole.headers["content-length"]) == len(whole.body)


def test_response_to_head_has_no_body(address: Address) -> None:
    requests = [head("HEAD", "/v1/models"), head("HEAD", "/nowhere"), head("HEAD", "/", "expect: a-miracle")]
    replies = talk(address, b"".join(requests), methods=("HEAD", "HEAD", "HEAD"))
    assert [each.status for each in replies] == [200, 404, 417]


def test_early_response_reaches_client_that_sends_before_it_reads(address: Address) -> None:
    count = 8 << 20
    with closing(connect(address)) as connection:
        connection.sendall(head("POST", "/nowhere", f"content-length: {count}"))
        connection.sendall(b"x" * count)
        [reply] = read_replies(connection, ("POST",))
    assert reply.status == 404 and reply.headers["connection"] == "close"


def test_early_response_instead_of_continue_closes_connection(address: Address) -> None:
    """Such a client may or may not send its body, so the next bytes could be a body or a request."""
    [reply] = talk(address, head("POST", "/nowhere", "expect: 100-continue", "content-length: 5"))
    assert (reply.status, reply.interim, reply.headers["connection"]) == (404, 0, "close")


def test_continue_is_sent_once(address: Address) -> None:
    body = json.dumps(COMPLETION).encode()
    with closing(connect(address)) as connection:
        start = head("POST", "/v1/completions", f"content-length: {len(body)}", "expect: 100-continue")
        connection.sendall(start)
        interim = b"HTTP/1.1 100 Continue\r\n\r\n"
        assert connection.recv(len(interim), socket.MSG_WAITALL) == interim
        connection.sendall(body)
        assert read_reply(connection, "POST").interim == 0


def test_error_after_complete_body_keeps_connection(address: Address) -> None:
    bad = head("POST", "/v1/completions", "content-length: 2") + b"{}"
    replies = talk(
        address,
        bad + head("POST", "/nowhere", "content-length: 2") + b"{}" + LAST,
        methods=("POST", "POST", "GET"),
    )
    assert [each.status for each in replies] == [400, 404, 200]


def test_rejection_follows_earlier_responses(address: Address) -> None:
    replies = talk(
        address, completion() + completion(stream=True) + b"\x16\x03\x01 hello\r\n\r\n", methods=("POST",) * 3
    )
    assert [each.status for each in replies] == [200, 200, 400]
    assert_rejected(replies[2], 400, None)
    assert replies[2].headers["x-request-id"] != "mine"


def test_disconnect_between_pipelined_requests_is_harmless(address: Address) -> None:
    """The response being written is that to the oldest request, not to the newest."""
    for _ in range(20):
        with closing(connect(address)) as connection:
            connection.sendall(completion() + GET + GET)
    for _ in range(10):  # a process that is about to crash would still respond for a moment
        assert [each.status for each in talk(address, completion("connection: close"))] == [200]


def test_pipelined_requests_are_limited(address: Address) -> None:
    count = 4 * MAX_PIPELINED_REQUESTS
    replies = talk(address, completion() + GET * count, methods=("POST", *["GET"] * count))
    assert len(replies) == 1 + MAX_PIPELINED_REQUESTS
    assert {each.status for each in replies} == {200}
    assert [each.headers.get("connection") for each in replies[-2:]] == [None, "close"]
