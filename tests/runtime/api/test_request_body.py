"""Request bodies: limits on size, time and JSON structure; and the format of request IDs."""

import asyncio
import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skiff_runtime.api.http import request_body
from skiff_runtime.api.http.request_body import (
    MAX_NODES,
    MIN_VALUE_LIMIT,
    BodyReader,
    ClientDisconnected,
    JsonStructureLimit,
)
from skiff_runtime.api.http.request_headers import choose_request_id
from skiff_runtime.errors import BodyTooLarge, BodyTooSlow


def read(
    *messages: dict[str, Any], length: int | None = None, limit: int = 10, timeout_seconds: float = 60.0
) -> bytes:
    """Read a body that arrives in these messages, and nothing after the last one."""
    queue = list(messages)

    async def receive() -> dict[str, Any]:
        return queue.pop(0) if queue else await asyncio.Event().wait()  # type: ignore[return-value]

    headers = [] if length is None else [(b"content-length", str(length).encode())]
    reader = BodyReader(limit, max_values=0, timeout_seconds=timeout_seconds)
    return asyncio.run(reader.read({"headers": headers}, receive))


def piece(body: bytes, more: bool = False) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


def test_pieces_are_joined() -> None:
    assert read(piece(b"abcde", True), piece(b"", True), piece(b"fghij")) == b"abcdefghij"
    assert read(piece(b"")) == b""


def test_content_length_beyond_limit_is_rejected_unread() -> None:
    with pytest.raises(BodyTooLarge, match="exceeds 10 bytes"):
        read(length=11)


def test_body_beyond_limit_is_rejected() -> None:
    with pytest.raises(BodyTooLarge):
        read(piece(b"x" * 11))
    with pytest.raises(BodyTooLarge):
        read(piece(b"x" * 6, True), piece(b"x" * 6, True))


def test_too_many_values_are_rejected_before_the_end() -> None:
    with pytest.raises(BodyTooLarge, match="strings, objects and arrays"):
        read(piece(b"[" * 9000, True), piece(b"[" * 9000, True), limit=1 << 20)


def test_body_without_end_times_out() -> None:
    with pytest.raises(BodyTooSlow, match="did not arrive within"):
        read(piece(b"x", True), length=5, timeout_seconds=0.05)


def test_disconnect_within_body_is_raised() -> None:
    with pytest.raises(ClientDisconnected):
        read(piece(b"x", True), {"type": "http.disconnect"})


@pytest.mark.parametrize("value", [b"", b"a b", b"a\r\nb", "ü".encode(), b"x" * 129, b'"'])
def test_invalid_request_id_is_replaced(value: bytes) -> None:
    assert choose_request_id([(b"x-request-id", value)]).isalnum()


TEXT = st.text(st.sampled_from('ab\\"{}[],:é'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


def count_nodes(value: Any) -> int:
    """Count the strings, keys, objects and arrays of a value."""
    if isinstance(value, dict):
        return 1 + sum(1 + count_nodes(each) for each in value.values())
    if isinstance(value, list):
        return 1 + sum(count_nodes(each) for each in value)
    return int(isinstance(value, str))


def count_separators(value: Any) -> int:
    """Count the commas and colons in the JSON of a value."""
    if isinstance(value, dict):
        return max(0, 2 * len(value) - 1) + sum(count_separators(each) for each in value.values())
    if isinstance(value, list):
        return max(0, len(value) - 1) + sum(count_separators(each) for each in value)
    return 0


@given(VALUES, st.lists(st.integers(0, 60), max_size=5), st.booleans())
def test_structure_count_is_exact_at_any_split(value: Any, cuts: list[int], ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    limit = JsonStructureLimit(0)
    edges = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    for start, end in itertools.pairwise(edges):
        limit.feed(raw[start:end])
    assert limit._quotes / 2 + limit._nodes == count_nodes(value)
    assert limit._values == count_separators(value)


@pytest.mark.parametrize("unit", [b'"k":1,', b"{},", b"[],", b'"",', b'"\\\\",', b'"\\"",'])
def test_too_many_nodes_are_rejected_before_the_end(unit: bytes) -> None:
    limit = JsonStructureLimit(0)
    with pytest.raises(BodyTooLarge, match="strings, objects and arrays"):
        for _ in range(1 + (2 * MAX_NODES) // 100):
            limit.feed(unit * 100)


def test_too_many_values_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_body, "MIN_VALUE_LIMIT", 100)
    JsonStructureLimit(0).feed(b"1," * 100)
    JsonStructureLimit(1000).feed(b"1," * 1000)
    with pytest.raises(BodyTooLarge, match="more than 100 values"):
        JsonStructureLimit(0).feed(b"1," * 101)
    assert MIN_VALUE_LIMIT >= 1 << 17


def test_text_does_not_count_as_structure() -> None:
    JsonStructureLimit(0).feed(b'{"prompt":"' + b'[{,:}] \\\\ \\n \\u00e9 \\" ' * 100_000 + b'"}')
