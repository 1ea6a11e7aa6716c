"""A live object covers the desired one when nothing that was asked for is missing or different."""

import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from services import hub, service

from skiff_operator import plan
from skiff_operator.drift import covers
from skiff_operator.kinds import DEPLOYMENT
from skiff_operator.settings import Settings

DESIRED = plan.objects(
    service(model=hub(), cache={"size": "1Gi"}, runtime={"env": [{"name": "A", "value": "1"}]}), Settings()
)[(DEPLOYMENT, "llama")]


def defaulted(value: Any) -> Any:
    """Add what an API server adds: more fields in each map, and other containers beside ours."""
    if isinstance(value, dict):
        return {key: defaulted(inner) for key, inner in value.items()} | {"addedByTheServer": True}
    if isinstance(value, list):
        more = [{"name": "injected"}] if value and isinstance(value[0], dict) and "name" in value[0] else []
        return [defaulted(inner) for inner in value] + more
    return value


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all leaves; an empty map or list is one."""
    if isinstance(value, dict) and value:
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list) and value:
        return [leaf for index, inner in enumerate(value) for leaf in leaves(inner, (*path, index))]
    return [path]


def at(value: Any, path: Sequence[Any]) -> Any:
    """The value at a path."""
    for step in path:
        value = value[step]
    return value


def test_defaults_and_additions_of_others_are_no_drift() -> None:
    assert covers(DESIRED, defaulted(DESIRED))


def test_a_changed_or_removed_leaf_is_drift() -> None:
    for *above, last in leaves(DESIRED):
        changed, shrunk = copy.deepcopy(DESIRED), copy.deepcopy(DESIRED)
        at(changed, above)[last] = "changed by hand"
        del at(shrunk, above)[last]
        assert not covers(DESIRED, changed), f"{above} {last} was changed"
        assert not covers(DESIRED, shrunk), f"{above} {last} was removed"


KEPT = ("replicas", "automountServiceAccountToken", "emptyDir", "runAsUser")
"""Fields whose False, 0 or empty value the API server stores."""
DROPPED = ("hostNetwork", "minReadySeconds", "subPath", "args", "first", "second", "third")
MAPS = ("labels", "nodeSelector", "limits")
FALSY: tuple[Any, ...] = (False, 0, "", None, [], {})


def trees() -> st.SearchStrategy[Any]:
    """Desired objects: falsy leaves in any place and order among others."""
    leaf = st.one_of(st.sampled_from(FALSY), st.integers(1, 9), st.sampled_from(["a", "b"]), st.just(True))
    maps = st.dictionaries(st.sampled_from(("x", "y", "z")), st.sampled_from(("", "1", "2")), max_size=3)

    def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        fields = st.dictionaries(st.sampled_from(KEPT + DROPPED), inner, max_size=6)
        return st.builds(
            lambda some, more: {**more, **some}, fields, st.dictionaries(st.sampled_from(MAPS), maps)
        )

    return deeper(st.recursive(leaf, deeper, max_leaves=12))


def stored(value: dict[str, Any], *, entries: bool = False) -> dict[str, Any]:
    """The object as an API server stores it: without what it drops, with defaults."""
    found: dict[str, Any] = {} if entries else {"addedByTheServer": True}
    for key, inner in value.items():
        if isinstance(inner, dict) and (inner or key in KEPT):
            found[key] = stored(inner, entries=key in MAPS)
        elif inner is not None and (inner or entries or key in KEPT):
            found[key] = inner
    return found


@given(trees())
def test_what_the_api_server_drops_is_no_drift(desired: dict[str, Any]) -> None:
    assert covers(desired, stored(desired))


@given(trees(), st.randoms(use_true_random=False), st.booleans())
def test_falsy_values_hide_no_change_behind_them(
    desired: dict[str, Any], choice: random.Random, removed: bool
) -> None:
    """Whatever the order of the fields is, and whether or not the changed one is falsy itself."""
    live = stored(desired)
    mine = [path for path in leaves(desired) if path and _exists(live, path)]
    assume(mine)
    path = choice.choice(mine)
    if removed:
        del at(live, path[:-1])[path[-1]]
    else:
        at(live, path[:-1])[path[-1]] = "changed by hand"
    assert not covers(desired, live)


def _exists(value: Any, path: tuple[Any, ...]) -> bool:
    for step in path:
        if not isinstance(value, dict) or step not in value:
            return False
        value = value[step]
    return True


@pytest.mark.parametrize(
    ("desired", "live", "same"),
    [
        ({"limits": {"cpu": "1000m"}}, {"limits": {"cpu": "1"}}, True),
        ({"requests": {"memory": "1024Mi"}}, {"requests": {"memory": "1Gi"}}, True),
        ({"requests": {"storage": "1.5Gi"}}, {"requests": {"storage": "1536Mi"}}, True),
        ({"limits": {"cpu": 2}}, {"limits": {"cpu": "2"}}, True),
        ({"limits": {"cpu": "2"}}, {"limits": {"cpu": "2k"}}, False),
        ({"limits": {"cpu": "2"}}, {"limits": {}}, False),
        ({"env": {"a": "1000m"}}, {"env": {"a": "1"}}, False),
        ({"emptyDir": {}}, {"hostPath": {"path": "/"}}, False),
        ({"readOnly": False}, {}, True),
        ({"readOnly": False, "name": "a"}, {}, False),
        ({"replicas": 0}, {"replicas": 1}, False),
        ({"replicas": 0, "paused": False, "name": "a"}, {"replicas": 0, "name": "b"}, False),
        ({"nodeSelector": {"gpu": ""}}, {"nodeSelector": {}}, False),
        ({"nodeSelector": {"gpu": ""}}, {}, False),
        ({"env": [{"name": "A", "value": ""}]}, {"env": [{"name": "A"}]}, True),
        ({"env": [{"name": "A", "value": ""}]}, {"env": []}, False),
        ({"securityContext": {"runAsNonRoot": False}}, {}, False),
        ({"resources": {"limits": {}}}, {}, True),
        ({"limits": {"cpu": 0}}, {"limits": {"cpu": "0"}}, True),
        ({"limits": {"cpu": 0}}, {}, False),
        ({"priorityClassName": None}, {"priorityClassName": "default"}, True),
        ({"imagePullSecrets": []}, {"imagePullSecrets": [{"name": "of others"}]}, True),
        ({"args": []}, {"args": ["by hand"]}, False),
        ({"args": ["a", "b"]}, {"args": ["b", "a"]}, False),
        ({"args": ["a"]}, {"args": ["a", "b"]}, False),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "a"}, {"key": "b"}]}, False),
        ({"spec": {"a": 1}}, {"spec": None}, False),
        ({"list": [1]}, {"list": "text"}, False),
        (
            {"volumeMounts": [{"name": "v", "mountPath": "/a"}, {"name": "v", "mountPath": "/b"}]},
            {"volumeMounts": [{"name": "v", "mountPath": "/b"}, {"name": "v", "mountPath": "/a"}]},
            True,
        ),
    ],
)
def test_amounts_empties_and_lists(desired: Any, live: Any, same: bool) -> None:
    assert covers(desired, live) is same
