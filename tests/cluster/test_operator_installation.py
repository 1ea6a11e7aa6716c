"""Demo and end-to-end tests leave alone what somebody else installed: against a real API server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import toolchain
from commands import ClusterError, output, wait_for
from controlplane import ControlPlane
from operator_installation import CRD, OPERATOR_NAMESPACE, OperatorInstallation
from paths import REPOSITORY, layout

MANIFEST = REPOSITORY / "manifests" / "crds" / "inferenceservices.yaml"


class Cluster:
    """A cluster, and the commands of whoever else uses it."""

    def __init__(self, plane: ControlPlane) -> None:
        self._base = [str(toolchain.kubectl(layout())), "--kubeconfig", str(plane.kubeconfig)]
        self.operator_installation = OperatorInstallation(self._base[0], self._base[2])

    def kubectl(self, *words: str) -> str:
        """Run kubectl and return its output."""
        return output([*self._base, *words])

    def install_crd(self) -> None:
        """Install the CustomResourceDefinition, and wait until it is served: it can be deleted at once only then."""
        self.kubectl("apply", "-f", str(MANIFEST))
        wait_for("the definition is served", self._serves_objects, timeout_seconds=60)

    def _serves_objects(self) -> bool:
        """Return whether objects can be listed, which begins shortly after the definition is established."""
        try:
            self.kubectl("get", "--raw", "/apis/serving.skiff.dev/v1alpha1/inferenceservices")
        except ClusterError:
            return False
        return True

    def crds(self) -> str:
        """Names of the CustomResourceDefinitions."""
        return self.kubectl("get", "crds", "--output", "name")


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with ControlPlane() as plane:
        yield plane


@pytest.fixture
def cluster(plane: ControlPlane) -> Iterator[Cluster]:
    """The cluster; afterwards without whatever a test has installed."""
    cluster = Cluster(plane)
    yield cluster
    cluster.kubectl("delete", "--ignore-not-found", "customresourcedefinition", CRD)
    cluster.kubectl("delete", "--ignore-not-found", "namespace", OPERATOR_NAMESPACE, "platform")


def test_what_was_claimed_is_ours_until_it_is_removed(cluster: Cluster) -> None:
    operator_installation = cluster.operator_installation
    assert not operator_installation.ours
    operator_installation.claim()
    cluster.install_crd()
    operator_installation.claim()
    assert operator_installation.ours and CRD in cluster.crds()
    operator_installation.remove()
    assert not operator_installation.ours and CRD not in cluster.crds()


@pytest.mark.parametrize("namespace", [OPERATOR_NAMESPACE, "platform"])
def test_an_operator_of_somebody_else_is_not_claimed(cluster: Cluster, namespace: str) -> None:
    cluster.kubectl("create", "namespace", namespace)
    cluster.install_crd()
    with pytest.raises(ClusterError, match="not installed from here"):
        cluster.operator_installation.claim()
    assert not cluster.operator_installation.ours and CRD in cluster.crds()


def test_a_namespace_without_an_operator_may_be_used(cluster: Cluster) -> None:
    cluster.kubectl("create", "namespace", OPERATOR_NAMESPACE)
    cluster.operator_installation.claim()
    assert cluster.operator_installation.ours
