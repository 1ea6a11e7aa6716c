"""A real API server, etcd and controller manager for the session, and an operator for each module that asks.

The operator runs as its own ServiceAccount under the RBAC of manifests/operator, so a verb that is missing there
fails a test here. There are no nodes: tests play the kubelet.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from apiserver import APPLY, ApiServer, Refused
from operator_process import LEASE_NAMESPACE, OperatorProcess, eventually

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/cluster"))

from controlplane import ControlPlane  # noqa: E402

CRD = ROOT / "manifests/crds/inferenceservices.yaml"
RIGHTS = "/apis/rbac.authorization.k8s.io/v1"
PLACES = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ClusterRole": f"{RIGHTS}/clusterroles",
    "ClusterRoleBinding": f"{RIGHTS}/clusterrolebindings",
    "Role": f"{RIGHTS}/namespaces/{{namespace}}/roles",
    "RoleBinding": f"{RIGHTS}/namespaces/{{namespace}}/rolebindings",
}


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    """The control plane; where its programs cannot be built, every test that needs it fails with the reason."""
    plane = ControlPlane()
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture(scope="session")
def server(plane: ControlPlane) -> ApiServer:
    """The API server with the CRD and the operator's identity and rights."""
    server = ApiServer(plane.kubeconfig)
    server.install(CRD)
    for name in ("namespace", "service-account", "rbac"):
        for body in yaml.safe_load_all((ROOT / f"manifests/operator/{name}.yaml").read_text()):
            meta = body["metadata"]
            place = PLACES[body["kind"]].format(namespace=meta.get("namespace", ""))
            path = f"{place}/{meta['name']}?fieldManager=tests"
            server.request("PATCH", path, body, kind=APPLY)
    eventually(lambda: _served(server), "the CRD is served")
    return server


@pytest.fixture(scope="session")
def operator_kubeconfig(
    server: ApiServer, plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A kubeconfig with the token of the operator's ServiceAccount."""
    accounts = server.in_namespace(LEASE_NAMESPACE).path("serviceaccounts", "skiff-operator", "token")
    token = server.request("POST", accounts, {"spec": {"expirationSeconds": 3600}})["status"]["token"]
    config = yaml.safe_load(plane.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    path = tmp_path_factory.mktemp("operator") / "kubeconfig"
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def operator(
    operator_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """A running operator that leads."""
    log = tmp_path_factory.mktemp("operator") / "log"
    with OperatorProcess(operator_kubeconfig, log, "--status-delay-seconds", "0.1") as process:
        yield process
        tracebacks = [line for line in log.read_text().splitlines() if '"traceback"' in line]
        assert not tracebacks, tracebacks


@pytest.fixture
def api(server: ApiServer, request: pytest.FixtureRequest) -> ApiServer:
    """A namespace of the test's own, under the restricted Pod Security level."""
    name = re.sub("[^a-z0-9]+", "-", request.node.name.lower())[:60].strip("-")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    return server.in_namespace(name)


def _served(server: ApiServer) -> bool:
    try:
        return server.list("inferenceservices") == []
    except Refused:
        return False
