"""What a body's structure is counted as, however its pieces are cut."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skiff_runtime.api import structure
from skiff_runtime.api.structure import MAX_PARTS, MIN_VALUE_LIMIT, JsonStructureLimit
from skiff_runtime.errors import BodyTooLarge

TEXT = st.text(st.sampled_from('ab\\"{}[],:é'), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=30,
)


def parts(value: Any) -> int:
    """Strings, keys, objects and arrays in a value."""
    if isinstance(value, dict):
        return 1 + sum(1 + parts(each) for each in value.values())
    if isinstance(value, list):
        return 1 + sum(parts(each) for each in value)
    return int(isinstance(value, str))


def separators(value: Any) -> int:
    """Commas and colons that its JSON needs."""
    if isinstance(value, dict):
        return max(0, 2 * len(value) - 1) + sum(separators(each) for each in value.values())
    if isinstance(value, list):
        return max(0, len(value) - 1) + sum(separators(each) for each in value)
    return 0


@given(VALUES, st.lists(st.integers(0, 60), max_size=5), st.booleans())
def test_the_count_is_exact(value: Any, cuts: list[int], ascii_only: bool) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    counted = JsonStructureLimit(0)
    edges = [0, *sorted(cut for cut in cuts if cut < len(raw)), len(raw)]
    for start, end in itertools.pairwise(edges):
        counted.feed(raw[start:end])
    assert counted._quotes / 2 + counted._parts == parts(value)
    assert counted._values == separators(value)


@pytest.mark.parametrize("unit", [b'"k":1,', b"{},", b"[],", b'"",', b'"\\\\",', b'"\\"",'])
def test_too_many_parts_are_refused_before_the_body_ends(unit: bytes) -> None:
    counted = JsonStructureLimit(0)
    with pytest.raises(BodyTooLarge, match="strings, objects and arrays"):
        for _ in range(1 + (2 * MAX_PARTS) // 100):
            counted.feed(unit * 100)


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structure, "MIN_VALUE_LIMIT", 100)
    JsonStructureLimit(0).feed(b"1," * 100)
    JsonStructureLimit(1000).feed(b"1," * 1000)
    with pytest.raises(BodyTooLarge, match="more than 100 values"):
        JsonStructureLimit(0).feed(b"1," * 101)
    assert MIN_VALUE_LIMIT >= 1 << 17


def test_text_is_no_structure() -> None:
    JsonStructureLimit(0).feed(b'{"prompt":"' + b'[{,:}] \\\\ \\n \\u00e9 \\" ' * 100_000 + b'"}')
