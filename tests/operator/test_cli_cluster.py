"""`skiff explain` and `skiff plan` on a real API server, and the status that they show."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from apiserver import APPLY, ApiServer
from controlplane import ControlPlane
from installation import RIGHTS
from operator_process import OperatorProcess, eventually, token_kubeconfig
from play_kubelet import PlayKubelet
from services import hub, raw
from strangers import condition

from skiff_operator.cli import main
from skiff_operator.failure import REMEDIES

USER_ROLES = Path(__file__).parents[2] / "manifests/operator/user-roles.yaml"
HUB_TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQr"


@pytest.fixture
def user(api: ApiServer, plane: ControlPlane, tmp_path: Path) -> str:
    """A kubeconfig of a user with the role view in the test's namespace, which the chart's roles extend."""
    for role in yaml.safe_load_all(USER_ROLES.read_text()):
        path = f"{RIGHTS}/clusterroles/{role['metadata']['name']}?fieldManager=tests&force=true"
        api.request("PATCH", path, role, kind=APPLY)
    api.create("serviceaccounts", {"metadata": {"name": "viewer"}})
    binding = {
        "metadata": {"name": "viewer"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
        "subjects": [{"kind": "ServiceAccount", "name": "viewer", "namespace": api.namespace}],
    }
    api.request("POST", f"{RIGHTS}/namespaces/{api.namespace}/rolebindings", binding)
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(token_kubeconfig(api, "viewer", plane.kubeconfig))
    return str(kubeconfig)


def test_a_viewer_reads_the_failure_from_the_cluster(
    api: ApiServer, user: str, operator: OperatorProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chart's roles let it read InferenceServices; this control plane has no kubelet, so the log is the status's."""
    body = raw("llama", model=hub(), runtime={"device": "cuda"})
    api.create("inferenceservices", {**body, "metadata": {"name": "llama"}})
    kubelet = PlayKubelet(api, "llama")
    made = (eventually(kubelet.pods, "a pod") or [])[0]
    log = f'{HUB_TOKEN} 2026 error fetch fetch_failed message="hub refuses org/a (401): check its name"'
    kubelet.crash(made, code=5, log=log, init=True)
    eventually(lambda: condition(api, "llama")[1] == "WeightsDownloadFailed", "the failure")
    failure = api.get("inferenceservices", "llama")["status"]["lastFailure"]
    assert failure["reason"] == "Unauthorized" and "credentialsSecretRef" in failure["remedy"]
    assert HUB_TOKEN not in str(api.get("inferenceservices", "llama"))

    def explained() -> str:
        arguments = ["explain", "infsvc/llama", "--kubeconfig", user, "-n", api.namespace]
        code = main.main(arguments)
        out = capsys.readouterr().out
        return out if code == 0 and "Warning" in out else ""

    screen = eventually(explained, "the rights of view, and the operator's event", 20)
    assert f"{api.namespace}/llama is not Ready: WeightsDownloadFailed" in screen
    assert "End of the log of fetch in llama-" in screen and "hub refuses org/a (401)" in screen
    assert "Warning  WeightsDownloadFailed" in screen
    assert REMEDIES["Unauthorized"][:50] in screen
    assert HUB_TOKEN not in screen
    assert main.main(["explain", "none", "--kubeconfig", user, "-n", api.namespace]) == 1
    assert "none" in capsys.readouterr().err


def test_a_plan_of_the_cluster(
    api: ApiServer,
    plane: ControlPlane,
    operator: OperatorProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "llama.yaml"

    def plans(**spec: Any) -> tuple[int, str]:
        body = {
            "apiVersion": "serving.skiff.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "llama"},
            "spec": {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}, **spec},
        }
        file.write_text(yaml.safe_dump(body))
        flags = ["--no-model", "--kubeconfig", str(plane.kubeconfig), "-n", api.namespace]
        code = main.main(["plan", "-f", str(file), *flags])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    code, text = plans()
    assert code == 1 and "a new InferenceService" in text and "Room: 1 pod in all" in text
    assert api.find("inferenceservices", "llama") is None, "a plan changes nothing"
    api.create("inferenceservices", yaml.safe_load(file.read_text()))
    [pod] = eventually(PlayKubelet(api, "llama").pods, "a pod")
    assert plans() == (0, f"{api.namespace}/llama: no difference\nMemory: not computed (--no-model)\n")
    code, text = plans(replicas=3)
    assert code == 1 and "Pods: none restarts" in text and "Replicas: 2 start" in text
    code, text = plans(drain={"timeoutSeconds": 5})
    assert code == 1 and f"Pods: 1 restart: {pod['metadata']['name']}" in text
    assert "spec.drain.timeoutSeconds   60    5" in text and "Room: 1 pod beside" in text
    code, text = plans(networkPolicy={"from": []})
    assert code == 1 and "Pods: none restarts" in text and "Versions" not in text
    assert "not enough: room for 0 of 1 pods now (no node admits the pod)" in plans(replicas=2)[1]
    code, text = plans(replicas=-1)
    assert code == 2 and "spec.replicas" in text
    code, text = plans(unheardOf=1)
    assert code == 2 and "unheardOf" in text
    code, text = plans(runtime={"args": ["--port=1"]})
    assert code == 2 and "--port is set by the operator" in text
    assert api.get("inferenceservices", "llama")["metadata"]["generation"] == 1


def test_the_status_has_the_startup_of_the_newest_pod(api: ApiServer, operator: OperatorProcess) -> None:
    api.create("inferenceservices", {**raw(runtime={"device": "cpu"}), "metadata": {"name": "llama"}})
    [made] = eventually(PlayKubelet(api, "llama").pods, "a pod")
    created = datetime.datetime.fromisoformat(made["metadata"]["creationTimestamp"])

    def report(*, ready: bool) -> None:
        def later(seconds: int) -> str:
            return (created + datetime.timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")

        changed = {"PodScheduled": (True, 1), "Ready": (ready, 30)}
        runtime = {"name": "runtime", "image": "img:1", "imageID": "", "restartCount": 0, "ready": ready}
        status = {
            "phase": "Running",
            "conditions": [
                {"type": kind, "status": str(holds), "lastTransitionTime": later(seconds)}
                for kind, (holds, seconds) in changed.items()
            ],
            "containerStatuses": [{**runtime, "state": {"running": {"startedAt": later(6)}}}],
        }
        api.merge("pods", made["metadata"]["name"], {"status": status}, "status")

    report(ready=False)
    eventually(lambda: condition(api, "llama", "ModelReady")[1] == "LoadingModel", "the server starts")
    report(ready=True)
    eventually(lambda: condition(api, "llama", "Ready")[0] == "True", "it is ready")
    found = api.get("inferenceservices", "llama")["status"]["startup"]
    seconds = {name: value for name, value in found.items() if name.endswith("Seconds")}
    assert seconds == {"scheduledSeconds": 1, "pulledSeconds": 5, "readySeconds": 30}
    assert found["pod"] == made["metadata"]["name"] and found["at"] and found["revision"]
    count = "skiff_operator_pod_startup_seconds_count{phase=%s}"
    assert [operator.metrics()[count % step] for step in ("ready", "loaded")] == [1, 0]
