"""The store of responses: its limits, and conversations that outlive their first responses."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skiff_runtime.api.formats import response_store
from skiff_runtime.api.formats.response_store import ResponseStore, StoredResponse
from skiff_runtime.errors import InvalidRequest, ResponseNotFound


def make_response(
    name: str, parent: StoredResponse | None = None, *, key: bytes = b"", size: int = 0
) -> StoredResponse:
    """Make a response of about ``size`` bytes, all in its output."""
    output = {"id": f"out-{name}", "text": name.upper() + "x" * size}
    return StoredResponse(
        name,
        key,
        b"{}",
        json.dumps([{"id": f"in-{name}"}]).encode(),
        parent,
        {f"out-{name}": json.dumps(output).encode()},
    )


def ids(response: StoredResponse) -> list[str]:
    return [item["id"] for item in response.load_conversation()]


def test_conversation_has_every_item_in_order() -> None:
    store = ResponseStore()
    first = make_response("a")
    store.add(first)
    store.add(make_response("b", store.get("a", b"")))
    assert ids(store.get("b", b"")) == ["in-a", "out-a", "in-b", "out-b"]
    assert store.load_items(["out-a"], b"") == {"out-a": {"id": "out-a", "text": "A"}}


def test_response_is_found_with_its_own_key_only() -> None:
    store = ResponseStore()
    store.add(make_response("a", key=b"one"))
    assert store.get("a", b"one").id == "a"
    for attempt in (
        lambda: store.get("a", b"two", param="previous_response_id"),
        lambda: store.get("a", b""),
        lambda: store.load_items(["out-a"], b"two"),
        lambda: store.delete("a", b"two"),
    ):
        with pytest.raises(ResponseNotFound):
            attempt()
    store.delete("a", b"one")
    with pytest.raises(ResponseNotFound):
        store.get("a", b"one")
    with pytest.raises(ResponseNotFound):
        store.load_items(["out-a"], b"one")


def test_oldest_responses_leave_beyond_the_number() -> None:
    store = ResponseStore(max_responses=2)
    for name in "abc":
        store.add(make_response(name))
    assert len(store) == 2
    with pytest.raises(ResponseNotFound, match="no response 'a'"):
        store.get("a", b"")
    with pytest.raises(ResponseNotFound):
        store.load_items(["out-a"], b"")


def test_oldest_responses_leave_beyond_the_bytes() -> None:
    store = ResponseStore(max_bytes=2500)
    for name in "abc":
        store.add(make_response(name, size=1000))
    assert len(store) == 2 and store.total_bytes <= 2500
    store.add(make_response("huge", size=5000))
    assert (len(store), store.total_bytes) == (0, 0)


def test_response_beyond_every_conversation_is_not_stored() -> None:
    store = ResponseStore()
    store.add(make_response("a"))
    store.add(make_response("huge", size=response_store.MAX_CONVERSATION_BYTES))
    assert store.get("a", b"").id == "a"
    with pytest.raises(ResponseNotFound):
        store.get("huge", b"")


@pytest.mark.parametrize(("limits", "size"), [({"max_responses": 4}, 0), ({"max_bytes": 4500}, 1000)])
def test_one_key_does_not_displace_the_responses_of_another(limits: dict[str, Any], size: int) -> None:
    store = ResponseStore(**limits)
    store.add(make_response("a", key=b"one", size=size))
    for number in range(20):
        store.add(make_response(f"b{number}", key=b"two", size=size))
    assert store.get("a", b"one").id == "a"
    assert [store.get(f"b{number}", b"two").id for number in (17, 18, 19)] == ["b17", "b18", "b19"]
    assert len(store) == 4


def test_of_equal_shares_the_oldest_response_leaves() -> None:
    now = iter(range(9))
    store = ResponseStore(max_responses=2, clock=lambda: next(now))
    for name in "ab":
        store.add(make_response(name, key=name.encode()))
    store.add(make_response("c", key=b"c"))
    assert store.get("b", b"b") and store.get("c", b"c")
    with pytest.raises(ResponseNotFound):
        store.get("a", b"a")


def test_responses_leave_when_they_are_too_old() -> None:
    now = 0.0
    store = ResponseStore(max_age_seconds=10, clock=lambda: now)
    store.add(make_response("a"))
    now = 5.0
    store.add(make_response("b"))
    now = 10.5
    with pytest.raises(ResponseNotFound):
        store.get("a", b"")
    assert store.get("b", b"").id == "b"
    now = 16.0
    with pytest.raises(ResponseNotFound):
        store.load_items(["out-b"], b"")
    assert (len(store), store.total_bytes) == (0, 0)


def test_conversation_outlives_its_first_response() -> None:
    store = ResponseStore()
    store.add(make_response("a"))
    first = store.get("a", b"")
    store.add(make_response("b", first))
    second = store.get("b", b"")
    store.delete("a", b"")
    assert ids(second) == ["in-a", "out-a", "in-b", "out-b"]
    assert store.total_bytes == first.size + second.size
    store.delete("b", b"")
    assert store.total_bytes == 0


def test_response_that_left_while_it_was_continued_counts_again() -> None:
    store = ResponseStore()
    store.add(make_response("a"))
    first = store.get("a", b"")
    store.delete("a", b"")
    store.add(make_response("b", first))
    assert store.total_bytes == first.size + store.get("b", b"").size


def test_too_long_conversation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_CONVERSATION_BYTES", 2000)
    store = ResponseStore()
    store.add(make_response("a", size=1000))
    store.add(make_response("b", store.get("a", b""), size=1000))
    assert ids(store.get("a", b"")) == ["in-a", "out-a"]
    with pytest.raises(InvalidRequest, match="begin a new one"):
        store.get("b", b"").load_conversation()


def test_references_are_limited_like_a_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_CONVERSATION_BYTES", 2000)
    store = ResponseStore()
    for name in "abc":
        store.add(make_response(name, size=900))
    assert list(store.load_items(["out-b", "out-a"], b"")) == ["out-b", "out-a"]
    with pytest.raises(InvalidRequest, match="referenced twice"):
        store.load_items(["out-a", "out-a"], b"")
    with pytest.raises(InvalidRequest, match="reference fewer"):
        store.load_items(["out-a", "out-b", "out-c"], b"")


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("adc"), st.integers(0, 9)), max_size=40))
def test_bytes_are_those_of_the_responses_that_are_reachable(steps: list[tuple[str, int]]) -> None:
    """A response is added (a), continued (c) or deleted (d)."""
    store, known = ResponseStore(max_responses=4), list[StoredResponse]()
    for number, (action, pick) in enumerate(steps):
        chosen = known[pick % len(known)] if known else None
        if action == "d" and chosen is not None:
            if chosen.id in store._responses:
                store.delete(chosen.id, b"")
        else:
            response = make_response(str(number), chosen if action == "c" else None, size=pick)
            store.add(response)
            known.append(response)
        reachable = set()
        for response in store._responses.values():
            node: StoredResponse | None = response
            while node is not None:
                reachable.add(node)
                node = node.parent
        assert store.total_bytes == sum(node.size for node in reachable)
        assert sum(share.num_bytes for share in store._shares.values()) == store.total_bytes
        assert set(store._items) == {f"out-{name}" for name in store._responses}
