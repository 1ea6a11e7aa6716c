"""Admission of pods by a real API server: quotas and limit ranges, privileged pods, GPUs that no node has."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver import MERGE, ApiServer
from operator_process import OperatorProcess, eventually
from play_kubelet import PlayKubelet
from services import hub, raw

pytestmark = pytest.mark.usefixtures("operator")
AMOUNTS = ("cpu", "memory", "ephemeral-storage")
GIVEN = {"limits": {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "3Gi"}}
NODES = "/api/v1/nodes"


@pytest.fixture(scope="module")
def operator(
    operator_kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """An operator that lists the nodes again after two seconds at most."""
    log = tmp_path_factory.mktemp("pods") / "log"
    with OperatorProcess(operator_kubeconfig, log, "--resync-seconds", "1") as process:
        yield process


def create(api: ApiServer, name: str = "llama", **fields: Any) -> None:
    """Create an InferenceService; by default the demo model."""
    body = raw(name, **fields)
    api.create("inferenceservices", {**body, "metadata": {"name": name}})


def degraded(api: ApiServer, name: str = "llama") -> tuple[str, str]:
    """Reason and message of Degraded; empty while it is not True."""
    status = api.get("inferenceservices", name).get("status", {})
    conditions = {each["type"]: each for each in status.get("conditions", [])}
    found = conditions.get("Degraded", {"status": "Unknown"})
    return (found["reason"], found["message"]) if found["status"] == "True" else ("", "")


def test_downloads_are_admitted_under_a_quota_that_demands_everything(api: ApiServer) -> None:
    hard = {f"{group}.{name}": "64Gi" for group in ("requests", "limits") for name in AMOUNTS}
    quotas = f"/api/v1/namespaces/{api.namespace}/resourcequotas"
    quota = api.request("POST", quotas, {"metadata": {"name": "all"}, "spec": {"hard": hard}})
    quota_path = f"{quotas}/{quota['metadata']['name']}"
    eventually(lambda: api.request("GET", quota_path)["status"].get("hard") == hard, "the quota is in force")
    create(api, model=hub(), runtime={"device": "cpu"}, resources=GIVEN)
    pod = eventually(lambda: PlayKubelet(api, "llama").pods() or degraded(api)[1], "a pod, or a refusal")[0]
    assert isinstance(pod, dict), degraded(api)
    for container in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]):
        assert (
            set(container["resources"]["limits"]) == set(container["resources"]["requests"]) == set(AMOUNTS)
        )


def test_downloads_are_admitted_beside_the_defaults_of_a_limit_range(api: ApiServer) -> None:
    defaults = {
        "type": "Container",
        "default": {"cpu": "100m", "memory": "128Mi", "ephemeral-storage": "1Gi"},
    }
    ranges = f"/api/v1/namespaces/{api.namespace}/limitranges"
    api.request("POST", ranges, {"metadata": {"name": "small"}, "spec": {"limits": [defaults]}})
    create(api, model=hub(), runtime={"device": "cpu"}, resources=GIVEN)
    pod = eventually(lambda: PlayKubelet(api, "llama").pods() or degraded(api)[1], "a pod, or a refusal")[0]
    assert isinstance(pod, dict), degraded(api)


def test_a_value_of_the_wrong_type_is_reported(api: ApiServer) -> None:
    create(api, runtime={"device": "cpu"}, podTemplate={"spec": {"nodeName": 5}})
    eventually(lambda: degraded(api)[0], "a refusal")
    assert degraded(api)[0] == "ApplyFailed"
    assert "nodeName" in degraded(api)[1]


def test_variables_of_the_users_replace_those_of_the_operator(api: ApiServer) -> None:
    given = [{"name": "HOME", "value": "/home"}, {"name": "HF_TOKEN", "value": "none"}]
    model = hub(credentialsSecretRef={"name": "hub"})
    create(api, model=model, runtime={"device": "cpu", "env": given})
    pod = eventually(lambda: PlayKubelet(api, "llama").pods() or degraded(api)[1], "a pod, or a refusal")[0]
    assert isinstance(pod, dict), degraded(api)
    assert pod["spec"]["containers"][0]["env"] == given
    variables = {each["name"]: each for each in pod["spec"]["initContainers"][0]["env"]}
    assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "hub"


@pytest.fixture
def unguarded(api: ApiServer) -> ApiServer:
    """A namespace in which Pod Security forbids nothing."""
    level = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "privileged"}}}
    api.request("PATCH", f"/api/v1/namespaces/{api.namespace}", level, kind=MERGE)
    return api


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hostNetwork", True),
        ("serviceAccountName", "default"),
        ("containers", [{"name": "agent", "image": "agent:1", "securityContext": {"privileged": True}}]),
    ],
)
def test_privileged_pods_and_other_accounts_are_refused(unguarded: ApiServer, field: str, value: Any) -> None:
    create(unguarded, runtime={"device": "cpu"}, podTemplate={"spec": {field: value}})
    made = unguarded.find
    eventually(lambda: degraded(unguarded)[0] or made("deployments", "llama"), "a refusal, or a Deployment")
    assert made("deployments", "llama") is None
    reason, message = degraded(unguarded)
    assert reason == "InvalidSpec"
    assert field in message and "--allow-privileged-pods" in message


@pytest.fixture
def node(api: ApiServer) -> Iterator[str]:
    """A node with 8 GPUs; nothing runs on it."""
    name = "gpu-node"
    api.request("POST", NODES, {"metadata": {"name": name, "labels": {"pool": "gpu"}}})
    amounts = {"nvidia.com/gpu": "8", "cpu": "64"}
    status = {"status": {"allocatable": amounts, "capacity": amounts}}
    api.request("PATCH", f"{NODES}/{name}/status", status, kind=MERGE)
    yield name
    api.request("DELETE", f"{NODES}/{name}")


def test_gpus_that_no_node_has_are_reported_before_any_pod_waits(api: ApiServer, node: str) -> None:
    create(api, parallelism={"tensor": 64})
    create(api, "fits", parallelism={"tensor": 8})
    create(api, "sliced", runtime={"gpuResourceName": "nvidia.com/mig-3g.40gb"})
    warning = "NoNodeLargeEnough", "no schedulable node has 64 nvidia.com/gpu; the largest has 8"
    eventually(lambda: degraded(api) == warning, "a warning")
    eventually(lambda: degraded(api, "sliced")[0], "another")
    assert api.find("deployments", "llama") is not None, "it warns and does not block"
    assert "has 1 nvidia.com/mig-3g.40gb; the largest has 0" in degraded(api, "sliced")[1]
    limits = eventually(PlayKubelet(api, "sliced").pods, "a pod")[0]["spec"]["containers"][0]["resources"]
    assert limits["limits"] == {"nvidia.com/mig-3g.40gb": "1"}
    eventually(lambda: "status" in api.get("inferenceservices", "fits"), "a status")
    eventually(lambda: degraded(api, "fits") == ("", ""), "no warning where a node is large enough")
