"""Reading a request: its body within limits of size and time, its id within limits of shape."""

import asyncio
from typing import Any

import pytest

from skiff_runtime.api.http.request_body import BodyReader, ClientDisconnected, request_id
from skiff_runtime.errors import BodyTooLarge, BodyTooSlow


def read(
    *messages: dict[str, Any], length: int | None = None, limit: int = 10, timeout_seconds: float = 60.0
) -> bytes:
    """Read a body that arrives in these messages; after the last one, nothing more comes."""
    queue = list(messages)

    async def receive() -> dict[str, Any]:
        return queue.pop(0) if queue else await asyncio.Event().wait()  # type: ignore[return-value]

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    reader = BodyReader(limit, max_values=0, timeout_seconds=timeout_seconds)
    return asyncio.run(reader.read(headers, receive))


def piece(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_pieces_are_joined() -> None:
    assert read(piece(b"abcde", True), piece(b"", True), piece(b"fghij")) == b"abcdefghij"
    assert read(piece(b"")) == b""


def test_a_declared_length_is_refused_unread() -> None:
    with pytest.raises(BodyTooLarge, match="exceeds 10 bytes"):
        read(length=11)


def test_a_length_that_was_not_declared() -> None:
    with pytest.raises(BodyTooLarge):
        read(piece(b"x" * 11))
    with pytest.raises(BodyTooLarge):
        read(piece(b"x" * 6, True), piece(b"x" * 6, True))


def test_too_much_structure_is_refused_unread() -> None:
    with pytest.raises(BodyTooLarge, match="strings, objects and arrays"):
        read(piece(b"[" * 9000, True), piece(b"[" * 9000, True), limit=1 << 20)


def test_a_body_that_never_ends() -> None:
    with pytest.raises(BodyTooSlow, match="did not arrive within"):
        read(piece(b"x", True), length=5, timeout_seconds=0.05)


def test_a_client_that_leaves() -> None:
    with pytest.raises(ClientDisconnected):
        read(piece(b"x", True), {"type": "http.disconnect"})


@pytest.mark.parametrize("value", [b"", b"a b", b"a\r\nb", "ü".encode(), b"x" * 129, b'"'])
def test_odd_request_ids_are_replaced(value: bytes) -> None:
    assert request_id([(b"x-request-id", value)]).isalnum()
