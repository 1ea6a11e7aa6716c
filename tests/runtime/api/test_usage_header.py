"""X-Skiff-Usage: the token counts that a router reads in headers and trailers, and no other client sees."""

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httptools
import pytest
from frontend import NAME, TIMEOUT_SECONDS, Frontend, echoing_frontend, write_model

from skiff_runtime.api.http.usage_header import TokenCounts, parse_usage_header

TEXT = "boats and more boats " * 2


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frontend]:
    with echoing_frontend(write_model(tmp_path_factory.mktemp("model"))) as front:
        yield front


@dataclass
class Message:
    """A response with its trailers."""

    headers: dict[str, str] = field(default_factory=dict)
    trailers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    in_body: bool = False
    complete: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        (self.trailers if self.in_body else self.headers)[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.in_body = True

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = True


def exchange(
    front: Frontend, path: str, body: dict[str, Any], *headers: str, version: str = "1.1"
) -> Message:
    """Send a request, and read its response down to the trailers."""
    host, _, port = front.url.removeprefix("http://").partition(":")
    data = json.dumps(body if path == "/generate" else {"model": NAME, **body}).encode()
    lines = [
        f"POST {path} HTTP/{version}",
        "host: localhost",
        f"content-length: {len(data)}",
        *headers,
        "",
        "",
    ]
    message = Message()
    parser = httptools.HttpResponseParser(message)
    with socket.create_connection((host, int(port)), TIMEOUT_SECONDS) as connection:
        connection.sendall("\r\n".join(lines).encode() + data)
        while not message.complete:
            received = connection.recv(1 << 16)
            if not received:
                break
            parser.feed_data(received)
    return message


def counts(value: str) -> tuple[TokenCounts, bool]:
    parsed = parse_usage_header(value.encode())
    assert parsed is not None, value
    return parsed


CHAT = {"messages": [{"role": "user", "content": TEXT}]}
REQUESTS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "n": 2}),
    ("/v1/completions", {"prompt": [TEXT, "x"]}),
    ("/v1/responses", {"input": TEXT}),
    ("/v1/messages", {**CHAT, "max_tokens": 300}),
    ("/generate", {"text": TEXT}),
]


def expected(path: str, body: dict[str, Any]) -> TokenCounts:
    """Return the counts in the usage of a JSON response."""
    usage = body["usage"]
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    return TokenCounts(prompt, 0, usage.get("completion_tokens", usage.get("output_tokens")))


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_counts_are_in_the_head_of_json_and_in_the_trailer_of_a_stream(
    front: Frontend, path: str, body: dict[str, Any]
) -> None:
    whole = exchange(front, path, body, "x-skiff-usage: 1")
    wanted = expected(path, json.loads(whole.body))
    assert wanted.prompt > 0 and wanted.completion > 0
    assert counts(whole.headers["x-skiff-usage"]) == (wanted, True)
    assert not whole.trailers
    stream = exchange(front, path, {**body, "stream": True}, "x-skiff-usage: 1")
    assert stream.headers["trailer"] == "x-skiff-usage"
    begun, is_final = counts(stream.headers["x-skiff-usage"])
    assert (begun.cached, begun.completion, is_final) == (0, 0, False)
    assert 0 < begun.prompt <= wanted.prompt
    assert counts(stream.trailers["x-skiff-usage"]) == (wanted, True)
    assert b"skiff-usage" not in stream.body


@pytest.mark.parametrize("stream", [False, True])
def test_counts_are_not_sent_without_the_header(front: Frontend, stream: bool) -> None:
    response = exchange(front, "/v1/chat/completions", {**CHAT, "stream": stream})
    assert response.complete
    assert not {"x-skiff-usage", "trailer"} & (response.headers.keys() | response.trailers.keys())


def test_pooled_requests_report_their_prompt(front: Frontend) -> None:
    response = exchange(front, "/v1/embeddings", {"input": [TEXT, "x"]}, "x-skiff-usage: 1")
    prompt = json.loads(response.body)["usage"]["prompt_tokens"]
    assert counts(response.headers["x-skiff-usage"]) == ((prompt, 0, 0), True)


def test_body_without_chunks_has_no_trailer(front: Frontend) -> None:
    response = exchange(
        front, "/v1/chat/completions", {**CHAT, "stream": True}, "x-skiff-usage: 1", version="1.0"
    )
    assert response.body.endswith(b"data: [DONE]\n\n")
    assert not response.trailers


def test_error_has_no_counts(front: Frontend) -> None:
    response = exchange(front, "/v1/chat/completions", {"messages": []}, "x-skiff-usage: 1")
    assert response.complete and "x-skiff-usage" not in response.headers


@pytest.mark.parametrize(
    "value",
    [b"", b"prompt=1", b"prompt=1, cached=-1", b"prompt=1, cached=1, completion=", b"prompt=1e9, cached=0"],
)
def test_malformed_value_is_refused(value: bytes) -> None:
    assert parse_usage_header(value) is None
