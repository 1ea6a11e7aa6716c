"""A live object covers the desired one when nothing that was asked for is missing or different."""

import copy
import random
from typing import Any

import pytest
from hypothesis import given
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
    """What an API server makes of it: more fields in each map, and other containers beside ours."""
    if isinstance(value, dict):
        return {key: defaulted(inner) for key, inner in value.items()} | {"addedByTheServer": True}
    if isinstance(value, list):
        more = [{"name": "injected"}] if value and isinstance(value[0], dict) and "name" in value[0] else []
        return [defaulted(inner) for inner in value] + more
    return value


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all leaves that hold something."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in leaves(inner, (*path, key))]
    if isinstance(value, list):
        return [leaf for index, inner in enumerate(value) for leaf in leaves(inner, (*path, index))]
    return [path] if value else []


def test_defaults_and_additions_of_others_are_no_drift() -> None:
    assert covers(DESIRED, defaulted(DESIRED))


@given(st.randoms(use_true_random=False))
def test_a_change_of_any_leaf_is_drift(choice: random.Random) -> None:
    live = copy.deepcopy(DESIRED)
    *path, last = choice.choice(leaves(DESIRED))
    place: Any = live
    for step in path:
        place = place[step]
    place[last] = "changed by hand"
    assert not covers(DESIRED, live)


@given(st.randoms(use_true_random=False))
def test_a_removed_leaf_is_drift(choice: random.Random) -> None:
    live = copy.deepcopy(DESIRED)
    *path, last = choice.choice(leaves(DESIRED))
    place: Any = live
    for step in path:
        place = place[step]
    del place[last]
    assert not covers(DESIRED, live)


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
        ({"emptyDir": {}}, {}, True),
        ({"readOnly": False}, {}, True),
        ({"replicas": 0}, {"replicas": 1}, False),
        ({"args": ["a", "b"]}, {"args": ["b", "a"]}, False),
        ({"args": ["a"]}, {"args": ["a", "b"]}, False),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "a"}, {"key": "b"}]}, False),
        ({"spec": {"a": 1}}, {"spec": None}, False),
        ({"list": [1]}, {"list": "text"}, False),
    ],
)
def test_amounts_empties_and_lists(desired: Any, live: Any, same: bool) -> None:
    assert covers(desired, live) is same
