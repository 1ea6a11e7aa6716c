"""Well-formed requests for the HTTP fuzzer: cheap ones of all kinds, with bodies that resemble other parts of a connection."""

import json
import random
from dataclasses import dataclass, field
from typing import Final

SMUGGLED_ID: Final = "smuggled"
SMUGGLED: Final = (
    f"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nx-request-id: {SMUGGLED_ID}\r\n\r\n".encode()
)
FILLERS: Final = (
    b"\r\nupgrade: x",
    b"\r\n\r\n",
    SMUGGLED,
    b"0\r\n\r\n",
    b"x" * 3000,
    b"\r\nupgrade:h2c" * 12,
)
MAX_CHUNKS: Final = 50


@dataclass
class Request:
    """A well-formed request, before its framing is drawn."""

    kind: str
    method: str
    path: str
    status: int
    body: bytes | None = None
    early: bool = False
    """The response may precede the body."""
    lines: list[str] = field(default_factory=list)
    text: str | None = None
    stream: bool = False


def draw_request(draw: random.Random, request_id: str, model: str) -> Request:
    """Draw a request. A completion must echo a text that contains the request's ID."""
    text = f"{request_id} {' pod' * draw.randrange(30)}"
    completion = {"model": model, "prompt": text, "echo": True, "max_tokens": draw.randrange(1, 4)}
    blanks = b"\r\n" * draw.choice((0, 0, 1, 2000))
    match draw.randrange(10):
        case 0 | 1:
            body = blanks + json.dumps(completion).encode()
            return Request("completion", "POST", "/v1/completions", 200, body, text=text)
        case 2:
            body = blanks + json.dumps({**completion, "stream": True}).encode()
            return Request("stream", "POST", "/v1/completions", 200, body, text=text, stream=True)
        case 3:
            return Request("no json", "POST", "/v1/completions", 400, filler(draw))
        case 4:
            lines = ["X-Request-Timeout-Seconds: none"]
            return Request(
                "bad header", "POST", "/v1/completions", 400, filler(draw), early=True, lines=lines
            )
        case 5:
            return Request("nowhere", "POST", "/nowhere", 404, filler(draw), early=True)
        case 6:
            return Request("wrong method", "POST", "/v1/models", 405, filler(draw), early=True)
        case 7:
            return Request("models", "GET", "/v1/models", 200)
        case 8:
            return Request("head", "HEAD", draw.choice(("/v1/models", "/livez")), 200)
        case _:
            return Request("get with body", "GET", "/livez", 200, filler(draw), early=True)


def filler(draw: random.Random) -> bytes:
    """Draw a body that is never empty and never JSON."""
    return b"x" + b"".join(draw.choices(FILLERS, k=draw.choice((0, 1, 2, 4, 12))))


def chunks(draw: random.Random, body: bytes, trailers: list[str]) -> bytes:
    """Return ``body`` in chunks, some with extensions, and ``trailers``."""
    pieces, rest = [], body
    while rest:
        size = max(draw.choice((1, 7, 100, 5000)), len(body) // MAX_CHUNKS)
        piece, rest = rest[:size], rest[size:]
        extension = draw.choice(("", "", "", ";a", ";a=b", ';a="b; c"', ";" + "e" * 60))
        pieces.append(f"{len(piece):x}{extension}\r\n".encode() + piece + b"\r\n")
    last = draw.choice(("0", "000", "0;a=b")) + "\r\n" + "".join(f"{line}\r\n" for line in trailers) + "\r\n"
    return b"".join(pieces) + last.encode()


def bait(draw: random.Random) -> bytes:
    """Return a body whose last ``count`` times ``growth`` bytes are a request.

    A server that took each "upgrade" in the body for a header, and changed the body's length by ``growth`` each time, would
    serve that request.
    """
    growth = draw.choice((-9, 1, 2, 10, 10, 10))
    count = -(-len(SMUGGLED) // abs(growth))
    pad = b"x-pad: %b\r\n\r\n" % (b"x" * (abs(growth) * (count + 12) - len(SMUGGLED) - 9))
    request = SMUGGLED[:-2] + pad
    return b"x" * draw.randrange(1, 50) + b"\r\nupgrade: x" * (len(request) // abs(growth)) + request
