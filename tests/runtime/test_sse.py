"""Events are found wherever the network cuts the stream."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skiff_runtime.errors import SkiffError
from skiff_runtime.sse import MAX_EVENT_BYTES, EventDecoder

STREAM = b'data: {"a": 1}\n\n: comment\nevent: x\ndata:two\r\ndata: lines\r\n\r\ndata: \xc3\xa9\n\n\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"two\nlines", "é".encode(), b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_survive_any_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    comments: list[bytes] = []
    decoder = EventDecoder(comments.append)
    pieces = [STREAM[low:high] for low, high in itertools.pairwise(edges)]
    assert [event for piece in pieces for event in decoder.feed(piece)] == EVENTS
    assert comments == [b"comment"]


def test_an_endless_event_is_refused() -> None:
    with pytest.raises(SkiffError, match="event of more than"):
        EventDecoder().feed(b"x" * (MAX_EVENT_BYTES + 1))
