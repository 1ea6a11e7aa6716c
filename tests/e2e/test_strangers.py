"""A namespace where strangers have every name that InferenceServices need: nothing of theirs is ever touched."""

from collections.abc import Iterator

import pytest
import strangers
from kube import Kube
from raw_kube import RawKube

NAMESPACE = "skiff-strangers"


@pytest.fixture
def crowded(operator: Kube) -> Iterator[Kube]:
    """A namespace of its own under the restricted Pod Security level, removed afterwards."""
    made = Kube(NAMESPACE)
    made.run("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s", timeout_seconds=150)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    made.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}})
    yield made
    made.run("delete", "namespace", NAMESPACE, "--timeout=120s", timeout_seconds=150)


def test_strangers_objects_are_untouched_to_the_end(crowded: Kube) -> None:
    strangers.play(RawKube(crowded))
