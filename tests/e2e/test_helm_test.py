"""The installed chart: `helm test`, with one operator and with two."""

from collections.abc import Iterator

import pytest
from helm import CHART, RELEASE, Helm
from kube import Kube


@pytest.fixture
def two_replicas(helm: Helm, operator: Kube) -> Iterator[None]:
    """A second operator for the length of a test."""
    where = [
        RELEASE,
        str(CHART),
        "--namespace",
        operator.namespace,
        "--reuse-values",
        "--wait",
        "--timeout",
        "4m",
    ]
    helm.run("upgrade", *where, "--set", "replicas=2,networkPolicy.enabled=true")
    yield
    helm.run("upgrade", *where, "--set", "replicas=1,networkPolicy.enabled=false")


def test_helm_test_passes(helm: Helm, operator: Kube) -> None:
    helm.run("test", RELEASE, "--namespace", operator.namespace, "--timeout", "3m")


@pytest.mark.usefixtures("two_replicas")
def test_a_second_operator_waits_behind_a_budget_and_a_policy(helm: Helm, operator: Kube) -> None:
    assert operator.get("poddisruptionbudget", "skiff-operator") is not None
    pods = operator.list("pods", "app.kubernetes.io/name=skiff-operator")
    assert len([pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]) == 2
    helm.run("test", RELEASE, "--namespace", operator.namespace, "--timeout", "3m")
