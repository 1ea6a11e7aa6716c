"""The podTemplate overlay merges as a strategic merge patch would, and changes neither of its arguments."""

import copy
from typing import Any

import pytest

from skiff_operator.errors import InvalidSpec
from skiff_operator.resources import overlay

BASE: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "containers": [
            {"name": "runtime", "env": [{"name": "X", "value": "1"}], "ports": [{"containerPort": 1}]}
        ],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "tolerations": [{"key": "a"}],
    },
}


def test_maps_merge_key_by_key() -> None:
    merged = overlay.merge(BASE, {"metadata": {"labels": {"b": "2"}, "annotations": {"c": "3"}}})
    assert merged["metadata"] == {"labels": {"a": "1", "b": "2"}, "annotations": {"c": "3"}}


def test_named_lists_merge_by_name_and_others_are_replaced() -> None:
    patch = {
        "containers": [
            {"name": "runtime", "env": [{"name": "Y", "value": "2"}, {"name": "X", "value": "3"}]},
            {"name": "sidecar", "image": "i"},
        ],
        "tolerations": [{"key": "b"}],
        "priorityClassName": "high",
    }
    merged = overlay.merge(BASE, {"spec": patch})["spec"]
    assert [container["name"] for container in merged["containers"]] == ["runtime", "sidecar"]
    assert merged["containers"][0]["env"] == [{"name": "X", "value": "3"}, {"name": "Y", "value": "2"}]
    assert merged["containers"][0]["ports"] == [{"containerPort": 1}]
    assert merged["tolerations"] == [{"key": "b"}]
    assert merged["volumes"] == [{"name": "tmp", "emptyDir": {}}]
    assert merged["priorityClassName"] == "high"


def test_a_name_that_comes_twice_is_merged_with_itself() -> None:
    volumes = [{"name": "more", "emptyDir": {}}, {"name": "more", "emptyDir": {"sizeLimit": "1Gi"}}]
    merged = overlay.merge(BASE, {"spec": {"volumes": volumes}})["spec"]["volumes"]
    assert merged == [{"name": "tmp", "emptyDir": {}}, {"name": "more", "emptyDir": {"sizeLimit": "1Gi"}}]


def test_null_removes() -> None:
    assert "tolerations" not in overlay.merge(BASE, {"spec": {"tolerations": None}})["spec"]


def test_neither_argument_is_changed() -> None:
    base, patch = copy.deepcopy(BASE), {"spec": {"volumes": [{"name": "more", "emptyDir": {}}]}}
    before = copy.deepcopy(patch)
    overlay.merge(base, patch)
    assert (base, patch) == (BASE, before)


@pytest.mark.parametrize("bad", ["text", [1], [{"value": "no name"}], [{"name": {"a": 1}}]])
def test_a_list_without_names_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidSpec, match="env must be a list whose entries have a name"):
        overlay.merge(BASE, {"spec": {"containers": [{"name": "runtime", "env": bad}]}})
