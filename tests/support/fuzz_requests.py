"""Hostile requests, drawn from a seed: bad bodies to every path, and bad HTTP around them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import fuzz_values as values
from raw_http import head

GENERATING: Final = ("/v1/completions", "/v1/chat/completions", "/generate")
PATHS: Final = (*GENERATING, "/tokenize", "/detokenize", "/flush_cache")
"""Not /abort, which would end the stream of the client that watches."""
_GOOD: Final = {
    "/v1/completions": '"model":"demo","prompt":"x","max_tokens":2',
    "/v1/chat/completions": '"model":"demo","messages":[{"role":"user","content":"x"}],"max_tokens":2',
    "/generate": '"text":"x","max_tokens":2',
    "/tokenize": '"prompt":"x"',
    "/detokenize": '"tokens":[5]',
    "/flush_cache": "",
}
PAUSE_SECONDS: Final = 0.02
LIMIT_BYTES: Final = 8 << 20
"""Beyond, a server refuses unread; whoever still sends then may lose the refusal to a connection reset."""


@dataclass(frozen=True, slots=True)
class Hostile:
    """``pieces`` are sent with pauses between; ``complete`` False: it is no whole request, and may go unanswered."""

    kind: str
    pieces: list[bytes]
    complete: bool = True


def draw_request(draw: random.Random) -> Hostile:
    """The next one; what costs the client itself much to send comes less often."""
    [make] = draw.choices(list(_MAKERS), weights=list(_MAKERS.values()))
    return make(draw)


def _posted(kind: str, path: str, body: str | bytes) -> Hostile:
    data = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    whole = head("POST", path, {"content-length": str(len(data))}) + data
    return Hostile(kind, [whole], complete=len(data) <= LIMIT_BYTES)


def _with(path: str, extra: str) -> str:
    """A good body and one more field; what it says twice is duplicated."""
    return "{" + ",".join(part for part in (_GOOD[path], extra) if part) + "}"


def _field(make: values.Maker) -> Callable[[random.Random], Hostile]:
    def made(draw: random.Random) -> Hostile:
        path = draw.choice(PATHS)
        return _posted(make.__name__, path, _with(path, f'"{values.any_field(draw)}":{make(draw)}'))

    return made


def _whole(draw: random.Random) -> Hostile:
    """The body is the hostile value itself."""
    make = draw.choice((values.number, values.text, values.nested, values.wrong))
    return _posted("whole", draw.choice(PATHS), make(draw))


def _response_format(draw: random.Random) -> Hostile:
    path = draw.choice(GENERATING)
    return _posted("schema_bomb", path, _with(path, f'"response_format":{values.schema(draw)}'))


def _tools(draw: random.Random) -> Hostile:
    """A bomb as the parameters of a tool that must be called."""
    tool = '{"type":"function","function":{"name":"f","parameters":' + values.bomb(draw) + "}}"
    path = "/v1/chat/completions"
    return _posted("tool_bomb", path, _with(path, f'"tools":[{tool}],"tool_choice":"required"'))


def _grammar(draw: random.Random) -> Hostile:
    path = draw.choice(GENERATING)
    return _posted("grammar", path, _with(path, values.grammar(draw)))


def _stops(draw: random.Random) -> Hostile:
    """A hundred thousand stop strings."""
    path = draw.choice(GENERATING)
    stops = ",".join(f'"s{number}"' for number in range(values.MANY))
    return _posted("stops", path, _with(path, f'"stop":[{stops}]'))


def _unknown(draw: random.Random) -> Hostile:
    """Unknown keys by the hundred thousand, or just below the limit on their number."""
    path = draw.choice(PATHS)
    keys = ",".join(f'"u{number}":0' for number in range(draw.choice((100, 16_000, values.MANY))))
    return _posted("unknown_keys", path, _with(path, keys))


def _duplicates(draw: random.Random) -> Hostile:
    path, name = draw.choice(PATHS), values.any_field(draw)
    pairs = ",".join(f'"{name}":{values.wrong(draw)}' for _ in range(draw.choice((2, 50, 3000))))
    return _posted("duplicates", path, _with(path, pairs))


def _bytes(draw: random.Random) -> Hostile:
    """A good body with some bytes changed, or bytes that are no text."""
    path = draw.choice(PATHS)
    body = bytearray(_with(path, '"user":"é東🙂"').encode())
    for _ in range(draw.randint(1, 6)):
        body[draw.randrange(len(body))] = draw.randrange(256)
    return _posted("bytes", path, bytes(body) if draw.random() < 0.8 else draw.randbytes(200))


def _trickle(draw: random.Random) -> Hostile:
    """A chunked body in small pieces; sometimes it never ends, sometimes the chunks lie."""
    path = draw.choice(PATHS)
    body = _with(path, "").encode()
    chunks = [b"1\r\n" + body[each : each + 1] + b"\r\n" for each in range(min(len(body), 24))]
    rest = body[len(chunks) :]
    last = (b"%x\r\n%b\r\n" % (len(rest), rest) if rest else b"") + b"0\r\n\r\n"
    ending = draw.choice((last, last, b"", b"zz\r\nx\r\n", b"ffffffffffffffff\r\n", b"-1\r\n\r\n"))
    start = head("POST", path, {"transfer-encoding": "chunked"})
    return Hostile("trickle", [start, *chunks, ending], complete=ending is last)


def _length(draw: random.Random) -> Hostile:
    """A content-length that is not the body's."""
    path = draw.choice(PATHS)
    body = _with(path, "").encode()
    told = draw.choice(
        (len(body) + 5, 1, 0, -1, 1 << 40, "x", "1 1", "0x5", "1e3", " ", "9" * 40, f"{len(body)}, 3")
    )
    return Hostile("length", [head("POST", path, {"content-length": str(told)}) + body], complete=False)


def _head(draw: random.Random) -> Hostile:
    """What is no HTTP, or too much of it."""
    told = draw.choice(
        (
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 9000 + b"\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(100),
            b"BREW /coffee HTCPCP/1.0\r\n\r\n",
            b"GET /v1/models/" + b"%2e%2e/" * 50 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET /metrics HTTP/9.9\r\n\r\n",
            b"GET http://other.example/v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"\r\n\r\n\r\n",
            b"GET / HTTP/1.1\nhost: x\n\n",
            b"POST /generate HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\nx-request-timeout-seconds: nan\r\ncontent-length: 2\r\n\r\n{}",
            b"POST /generate HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n{}",
            b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n\r\n",
            draw.randbytes(draw.randint(1, 500)),
        )
    )
    return Hostile("head", [told], complete=False)


def _path(draw: random.Random) -> Hostile:
    """A path or a method that is not served."""
    method = draw.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"))
    path = draw.choice(
        (*PATHS, "/", "//", "/v1", "/v1/embeddings", "/%00", "/docs/../metrics", "/v1/models/%ff")
    )
    return Hostile("path", [head(method, path, {"content-length": "0"})])


_MAKERS: Final[dict[Callable[[random.Random], Hostile], float]] = {
    _field(values.wrong): 12,
    _field(values.number): 12,
    _field(values.text): 8,
    _field(values.nested): 6,
    _field(values.many): 0.7,
    _field(values.big): 0.4,
    _whole: 6,
    _response_format: 1.5,
    _tools: 0.5,
    _grammar: 1,
    _stops: 0.5,
    _unknown: 1,
    _duplicates: 5,
    _bytes: 12,
    _trickle: 5,
    _length: 8,
    _head: 6,
    _path: 8,
}
