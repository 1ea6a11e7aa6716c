"""Hostile requests, drawn from a seed: invalid bodies to every path, and invalid HTTP around them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import fuzz_values as values
from raw_http import head

GENERATING: Final = ("/v1/completions", "/v1/chat/completions", "/generate")
MESSAGES: Final = ("/v1/messages", "/v1/messages/count_tokens")
RESPONSES: Final = "/v1/responses"
PATHS: Final = (*GENERATING, *MESSAGES, RESPONSES, "/tokenize", "/detokenize", "/flush_cache")
"""Without /abort, which would end the stream of the client that measures latency."""
_VALID: Final = {
    "/v1/completions": '"model":"demo","prompt":"x","max_tokens":2',
    "/v1/chat/completions": '"model":"demo","messages":[{"role":"user","content":"x"}],"max_tokens":2',
    "/generate": '"text":"x","max_tokens":2',
    "/v1/messages": '"model":"demo","messages":[{"role":"user","content":"x"}],"max_tokens":2',
    "/v1/messages/count_tokens": '"model":"demo","messages":[{"role":"user","content":"x"}]',
    RESPONSES: '"model":"demo","input":"x","max_output_tokens":2',
    "/tokenize": '"prompt":"x"',
    "/detokenize": '"tokens":[5]',
    "/flush_cache": "",
}
_READS: Final = ("/health", "/ping", "/version", "/tokenizer_info")
PAUSE_SECONDS: Final = 0.02
LIMIT_BYTES: Final = 8 << 20
"""A server rejects a larger body unread; a client that still sends may lose the response to a connection reset."""


@dataclass(frozen=True, slots=True)
class FuzzRequest:
    """``pieces`` are sent with pauses between them. ``complete`` False: an incomplete request, which needs no response."""

    kind: str
    pieces: list[bytes]
    complete: bool = True


def draw_request(draw: random.Random) -> FuzzRequest:
    """Draw the next request. Those that are expensive to send are less frequent."""
    [make] = draw.choices(list(_MAKERS), weights=list(_MAKERS.values()))
    return make(draw)


def _make_post(kind: str, path: str, body: str | bytes) -> FuzzRequest:
    data = body if isinstance(body, bytes) else body.encode("utf-8", "surrogatepass")
    request = head("POST", path, {"content-length": str(len(data))}) + data
    return FuzzRequest(kind, [request], complete=len(data) <= LIMIT_BYTES)


def _with(path: str, extra: str) -> str:
    """Return a valid body with one more field, which may be a duplicate."""
    return "{" + ",".join(part for part in (_VALID[path], extra) if part) + "}"


def _field(make: values.Maker) -> Callable[[random.Random], FuzzRequest]:
    def make_request(draw: random.Random) -> FuzzRequest:
        path = draw.choice(PATHS)
        return _make_post(make.__name__, path, _with(path, f'"{values.any_field(draw)}":{make(draw)}'))

    return make_request


def _whole(draw: random.Random) -> FuzzRequest:
    """Draw a request whose whole body is a hostile value."""
    make = draw.choice((values.number, values.text, values.nested, values.wrong))
    return _make_post("whole", draw.choice(PATHS), make(draw))


def _response_format(draw: random.Random) -> FuzzRequest:
    path = draw.choice(GENERATING)
    return _make_post("schema_bomb", path, _with(path, f'"response_format":{values.schema(draw)}'))


def _tools(draw: random.Random) -> FuzzRequest:
    """Draw a schema bomb as the parameters of a tool that must be called."""
    tool = '{"type":"function","function":{"name":"f","parameters":' + values.bomb(draw) + "}}"
    path = "/v1/chat/completions"
    return _make_post("tool_bomb", path, _with(path, f'"tools":[{tool}],"tool_choice":"required"'))


def _messages(draw: random.Random) -> FuzzRequest:
    """Draw a conversation of content blocks with hostile values, or a tool or output format of Anthropic's shape."""
    path = draw.choice(MESSAGES)
    kind = draw.choice(
        ("text", "thinking", "tool_use", "tool_result", "image", "document", "server_tool_use")
    )
    field = draw.choice(
        ("text", "thinking", "input", "content", "id", "tool_use_id", "type", "cache_control")
    )
    block = f'{{"type":"{kind}","{field}":{values.any_value(draw)}}}'
    role = draw.choice(("user", "assistant", "system"))
    extra = draw.choice(
        (
            f'"messages":[{{"role":"{role}","content":[{block}]}}]',
            f'"system":[{block}]',
            f'"tools":[{{"name":"f","input_schema":{values.any_value(draw)}}}],"tool_choice":{{"type":"any"}}',
            f'"output_config":{{"format":{{"type":"json_schema","schema":{values.bomb(draw)}}}}}',
            f'"thinking":{values.any_value(draw)}',
        )
    )
    return _make_post("messages", path, _with(path, extra))


def _response_items(draw: random.Random) -> FuzzRequest:
    """Draw a Responses request with hostile items, tools or references to what is not stored."""
    kinds = (
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        "item_reference",
        "computer_call",
    )
    names = ("id", "role", "content", "call_id", "name", "arguments", "output", "summary", "namespace")
    item = {f'"{name}"': values.wrong(draw) for name in draw.sample(names, draw.randint(0, 5))}
    item['"type"'] = draw.choice([f'"{kind}"' for kind in kinds] + [values.wrong(draw)])
    text = "{" + ",".join(f"{name}:{value}" for name, value in item.items()) + "}"
    extra = draw.choice(
        (
            f'"input":[{",".join([text] * draw.choice((1, 2, 500)))}]',
            f'"tools":[{text}]',
            f'"tools":[{{"type":"namespace","name":"n","tools":[{text}]}}]',
            f'"tool_choice":{text}',
            f'"text":{{"format":{text}}}',
            f'"previous_response_id":{values.wrong(draw)}',
        )
    )
    return _make_post("response_items", RESPONSES, _with(RESPONSES, extra))


def _stored_response(draw: random.Random) -> FuzzRequest:
    """Draw a request about a response that is not stored."""
    name = draw.choice(("resp_1", "%00", "..", "%2e%2e", "a" * 5000, "resp_%ff", "x/y"))
    suffix = draw.choice(
        ("", "/cancel", "/input_items", "/input_items?limit=-1&order=up&after=x", "?stream=true")
    )
    method = draw.choice(("GET", "POST", "DELETE"))
    path = f"{RESPONSES}/{name}{suffix}"
    return FuzzRequest("stored_response", [head(method, path, {"content-length": "0"})])


def _grammar(draw: random.Random) -> FuzzRequest:
    path = draw.choice(GENERATING)
    return _make_post("grammar", path, _with(path, values.grammar(draw)))


def _stops(draw: random.Random) -> FuzzRequest:
    """Draw a request with a hundred thousand stop strings."""
    path = draw.choice(GENERATING)
    stops = ",".join(f'"s{number}"' for number in range(values.MANY))
    return _make_post("stops", path, _with(path, f'"stop":[{stops}]'))


def _unknown(draw: random.Random) -> FuzzRequest:
    """Draw a request with a hundred thousand unknown keys, or just below the limit on their number."""
    path = draw.choice(PATHS)
    keys = ",".join(f'"u{number}":0' for number in range(draw.choice((100, 16_000, values.MANY))))
    return _make_post("unknown_keys", path, _with(path, keys))


def _duplicates(draw: random.Random) -> FuzzRequest:
    path, name = draw.choice(PATHS), values.any_field(draw)
    pairs = ",".join(f'"{name}":{values.wrong(draw)}' for _ in range(draw.choice((2, 50, 3000))))
    return _make_post("duplicates", path, _with(path, pairs))


def _bytes(draw: random.Random) -> FuzzRequest:
    """Draw a valid body with some bytes changed, or random bytes."""
    path = draw.choice(PATHS)
    body = bytearray(_with(path, '"user":"é東🙂"').encode())
    for _ in range(draw.randint(1, 6)):
        body[draw.randrange(len(body))] = draw.randrange(256)
    return _make_post("bytes", path, bytes(body) if draw.random() < 0.8 else draw.randbytes(200))


def _trickle(draw: random.Random) -> FuzzRequest:
    """Draw a chunked body in small pieces, which may have no end or wrong chunk sizes."""
    path = draw.choice(PATHS)
    body = _with(path, "").encode()
    chunks = [b"1\r\n" + body[each : each + 1] + b"\r\n" for each in range(min(len(body), 24))]
    rest = body[len(chunks) :]
    last = (b"%x\r\n%b\r\n" % (len(rest), rest) if rest else b"") + b"0\r\n\r\n"
    ending = draw.choice((last, last, b"", b"zz\r\nx\r\n", b"ffffffffffffffff\r\n", b"-1\r\n\r\n"))
    start = head("POST", path, {"transfer-encoding": "chunked"})
    return FuzzRequest("trickle", [start, *chunks, ending], complete=ending is last)


def _length(draw: random.Random) -> FuzzRequest:
    """Draw a request with a wrong Content-Length."""
    path = draw.choice(PATHS)
    body = _with(path, "").encode()
    length = draw.choice(
        (len(body) + 5, 1, 0, -1, 1 << 40, "x", "1 1", "0x5", "1e3", " ", "9" * 40, f"{len(body)}, 3")
    )
    return FuzzRequest("length", [head("POST", path, {"content-length": str(length)}) + body], complete=False)


def _head(draw: random.Random) -> FuzzRequest:
    """Draw bytes that are not HTTP, or a head beyond a limit."""
    data = draw.choice(
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
    return FuzzRequest("head", [data], complete=False)


def _path(draw: random.Random) -> FuzzRequest:
    """Draw a request to a path or with a method that is not served."""
    method = draw.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"))
    path = draw.choice(
        (*PATHS, *_READS, "/", "//", "/v1", "/v1/embeddings", "/%00", "/docs/../metrics", "/v1/models/%ff")
    )
    return FuzzRequest("path", [head(method, path, {"content-length": "0"})])


_MAKERS: Final[dict[Callable[[random.Random], FuzzRequest], float]] = {
    _field(values.wrong): 12,
    _field(values.number): 12,
    _field(values.text): 8,
    _field(values.nested): 6,
    _field(values.many): 0.7,
    _field(values.big): 0.4,
    _whole: 6,
    _response_format: 1.5,
    _tools: 0.5,
    _messages: 8,
    _response_items: 5,
    _stored_response: 2,
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
