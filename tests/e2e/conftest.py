"""One operator, installed with Helm, and one namespace with a client pod, for the whole session."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from helm import CHART, RELEASE, Helm
from kube import Kube, tool, wait
from operator_installation import OPERATOR_NAMESPACE, OperatorInstallation

ROOT = Path(__file__).parents[2]
NAMESPACE = "skiff-e2e"
CLIENT = "client"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs a cluster."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session")
def helm() -> Helm:
    """Helm against the cluster."""
    return Helm(Path(tool("kubeconfig")))


@pytest.fixture(scope="session")
def operator(helm: Helm) -> Kube:
    """The operator's namespace, with the operator running in it; ClusterError where one is there that somebody relies on."""
    OperatorInstallation(tool("kubectl-path"), tool("kubeconfig")).claim()
    repository, _, tag = tool("image", "operator").rpartition(":")
    runtime = tool("image", "runtime")
    values = f"image.repository={repository},image.tag={tag},runtimeImage.cpu={runtime}"
    release = [RELEASE, "--namespace", OPERATOR_NAMESPACE]
    helm.run("uninstall", *release, "--ignore-not-found", "--wait")
    wait = ["--wait", "--timeout", "4m"]
    helm.run("upgrade", "--install", RELEASE, str(CHART), *release[1:], *wait, "--set", values)
    return Kube(OPERATOR_NAMESPACE)


@pytest.fixture(scope="session")
def kube(operator: Kube) -> Iterator[Kube]:
    """A namespace under the restricted Pod Security level, removed afterwards."""
    made = Kube(NAMESPACE)
    made.run("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s", timeout_seconds=150)
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    made.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": restricted}}
    )
    wait(lambda: made.get("serviceaccount", "default") is not None, timeout_seconds=30)
    yield made
    made.run("delete", "namespace", NAMESPACE, "--timeout=120s", timeout_seconds=150)


@pytest.fixture(scope="session")
def client(kube: Kube) -> str:
    """A pod with curl and the openai package, which does nothing by itself.

    It requests CPU: without a request, a pod that starts would leave almost nothing to the traffic driver in it.
    """
    kube.apply(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": CLIENT},
            "spec": {
                "automountServiceAccountToken": False,
                "terminationGracePeriodSeconds": 1,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 65532,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [
                    {
                        "name": CLIENT,
                        "image": tool("image", "client"),
                        "command": ["sleep", "infinity"],
                        "resources": {"requests": {"cpu": "250m"}},
                        "securityContext": {
                            "allowPrivilegeEscalation": False,
                            "capabilities": {"drop": ["ALL"]},
                        },
                    }
                ],
            },
        }
    )
    kube.run("wait", "--for=condition=Ready", f"pod/{CLIENT}", "--timeout=120s", timeout_seconds=150)
    return CLIENT


@pytest.fixture(scope="session")
def llama(kube: Kube) -> str:
    """The sample of the README, Ready."""
    kube.run("apply", "-f", str(ROOT / "manifests/samples/llama-service.yaml"))
    kube.wait_ready("llama")
    return "llama"
