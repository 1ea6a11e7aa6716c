"""Traffic through a Service while everything behind it changes: no request fails, and every answer is right.

`make e2e` runs the tests without the marker `traffic`, with a few hundred requests. `make traffic` runs all of them and repeats each
change until `SKIFF_TEST_TRAFFIC_REQUESTS` requests were sent in sum. Only where a pod is killed may requests fail, and then
only those that it had.
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from helm import CHART, RELEASE, Helm
from kube import Kube, KubectlError, Object, inference_service, tool, wait
from onenode import OneNode
from paths import layout
from providers import made
from traffic import CONNECT_TIMEOUT_SECONDS, Failure
from traffic_reports import QUIET_SECONDS, check, publish, recorded
from traffic_run import TrafficRun

NAME: Final = "traffic"
NEXT: Final = "traffic-next"
URL: Final = f"http://{NAME}"
MODEL: Final = "skiff-demo"
PODS: Final = f"serving.skiff.dev/inferenceservice={NAME}"
RUNTIME: Final = {
    "device": "cpu",
    "dtype": "float32",
    "env": [{"name": "SKIFF_CPU_THREADS", "value": "1"}],
}
"""A CPU without instructions for bfloat16 computes the demo model several times as fast in float32, and the threads of two pods
on two cores would wait for each other."""
DEMO: Final = "demo"
CHANGED: Final = "changed"
"""A revision of the model with other weights, and so with other right answers."""
SCENARIOS: Final = 10
TOTAL_REQUESTS: Final = int(os.environ.get("SKIFF_TEST_TRAFFIC_REQUESTS", "0"))
RATE: Final = float(os.environ.get("SKIFF_TEST_TRAFFIC_RATE", "10"))
REPORTS: Final = os.environ.get("SKIFF_TEST_TRAFFIC_REPORTS", "")
SHARE: Final = math.ceil(TOTAL_REQUESTS / SCENARIOS)
KILLS: Final = ("processes killed", "pod deleted by force")
NOTICE_SECONDS: Final = 15.0 + CONNECT_TIMEOUT_SECONDS
"""Time after a kill within which requests may fail: the command, the kubelet and the endpoints on a crowded machine, and then a
connection to the pod that is gone."""
WITHOUT_API_SECONDS: Final = 40.0
"""Less than the 50 s after which Kubernetes' controller manager finds the node's lease too old, once it can read again: it
then takes all pods of the node from the endpoints until the kubelet has renewed the lease."""
SETTLE_SECONDS: Final = 240.0
OPERATOR_PODS: Final = "app.kubernetes.io/name=skiff-operator"
CHANGE_WEIGHTS: Final = """
import pathlib, shutil
from safetensors.torch import load_file, save_file
from skiff_runtime import demo
target = pathlib.Path("/models/changed")
shutil.copytree(demo.DIRECTORY, target, dirs_exist_ok=True)
tensors = load_file(target / "model.safetensors")
name = next(name for name in sorted(tensors) if name.endswith("layers.1.mlp.down_proj.weight"))
tensors[name] = tensors[name] * 0
save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
"""


@pytest.fixture(scope="module")
def reports() -> Iterator[dict[str, dict[str, Any]]]:
    """The reports of all scenarios by name; printed as a table at the end, which REPORTS/traffic.md gets as well."""
    collected: dict[str, dict[str, Any]] = {}
    yield collected
    publish(collected, REPORTS, "traffic.md")


@pytest.fixture(scope="module")
def service(kube: Kube, client: str) -> Iterator[str]:
    """One InferenceService for all scenarios, and the right answers of its model, recorded in the client pod."""
    kube.apply(inference_service(NAME, runtime=RUNTIME))
    kube.wait_ready(NAME)
    TrafficRun(kube, client).record(URL, MODEL, DEMO)
    yield NAME
    kube.run("delete", "infsvc", NAME, "--timeout=60s")


@pytest.fixture(scope="module")
def one_node() -> OneNode:
    """The one-node cluster of tests/cluster, whose images and processes a test may change."""
    provider = made(layout())
    if not isinstance(provider, OneNode) or Path(tool("kubeconfig")) != provider.kubeconfig:
        pytest.skip("needs the one-node cluster of tests/cluster")
    return provider


@contextlib.contextmanager
def traffic(
    kube: Kube,
    client: str,
    name: str,
    reports: dict[str, dict[str, Any]],
    *,
    replicas: int = 1,
    revisions: tuple[str, ...] = (DEMO,),
    retries: int = 0,
    rate: float = RATE,
) -> Iterator[TrafficRun]:
    """Send requests for the length of a with-block, some seconds before and after included; add the report to `reports`.

    The service has `replicas` at the beginning.
    """
    scale(kube, replicas)
    run = TrafficRun(
        kube, client, name=name.replace(",", "").replace(" ", "-"), port=8701 if retries else 8700
    )
    run.start(URL, MODEL, rate=rate, revisions=revisions, retries=retries)
    with recorded(run, name, reports, REPORTS):
        yield run


def pods(kube: Kube) -> list[Object]:
    """Return the service's pods, terminating ones included."""
    return kube.list("pods", PODS)


def wait_settled(kube: Kube) -> None:
    """Wait until the newest revision serves with all of its pods, and every other pod is gone."""

    def settled() -> bool:
        found = kube.get("infsvc", NAME)
        assert found is not None
        replicas, status = found["spec"].get("replicas", 1), found.get("status", {})
        return (
            kube.is_ready(NAME)
            and status["readyReplicas"] == status["replicas"] == status["updatedReplicas"] == replicas
            and len(kube.list("pods", PODS)) == replicas
        )

    wait(
        settled,
        timeout_seconds=SETTLE_SECONDS,
        explain=lambda: json.dumps((kube.get("infsvc", NAME) or {}).get("status"), indent=1),
    )


def patch(kube: Kube, **spec: Any) -> None:
    """Change fields of the service's spec; None removes one."""
    kube.run("patch", "infsvc", NAME, "--type=merge", "-p", json.dumps({"spec": spec}))


def scale(kube: Kube, replicas: int) -> None:
    """Set the number of replicas and wait for them."""
    kube.run("scale", "infsvc", NAME, f"--replicas={replicas}")
    wait_settled(kube)


def wait_for_operator(operator: Kube) -> None:
    """Wait until the operator's Deployment has rolled out."""
    operator.run("rollout", "status", "deployment/skiff-operator", "--timeout=120s", timeout_seconds=150)


def test_an_edit_of_arguments(
    kube: Kube, client: str, service: str, reports: dict[str, dict[str, Any]]
) -> None:
    with traffic(kube, client, "edit of arguments", reports) as run:
        for number in run.rounds(SHARE):
            run.mark("rollout")
            patch(kube, runtime={"args": [f"--max-running-requests={64 + number}"]})
            wait_settled(kube)
    check(reports["edit of arguments"])


def test_scaling_out_and_in(
    kube: Kube, client: str, service: str, reports: dict[str, dict[str, Any]]
) -> None:
    with traffic(kube, client, "scaling", reports) as run:
        for _ in run.rounds(SHARE):
            run.mark("scaling out")
            scale(kube, 2)
            assert kube.list("poddisruptionbudgets", PODS)
            run.mark("scaling in")
            scale(kube, 1)
            assert not kube.list("poddisruptionbudgets", PODS)
    check(reports["scaling"])


@pytest.mark.traffic
def test_an_evicted_pod(kube: Kube, client: str, service: str, reports: dict[str, dict[str, Any]]) -> None:
    """Evict pods by the API that `kubectl drain` uses; with one node, a drained pod would have nowhere to go."""
    with traffic(kube, client, "eviction", reports, replicas=2) as run:
        for _ in run.rounds(SHARE):
            run.mark("eviction")
            for name in [pod["metadata"]["name"] for pod in pods(kube)]:
                evict(kube, name)
                wait_settled(kube)
    check(reports["eviction"])


def evict(kube: Kube, name: str) -> None:
    """Evict one pod. The API server refuses where the PodDisruptionBudget does."""
    body = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": name, "namespace": kube.namespace},
    }
    path = f"/api/v1/namespaces/{kube.namespace}/pods/{name}/eviction"
    kube.run("create", "--raw", path, "-f", "-", text=json.dumps(body))


def test_a_killed_pod(kube: Kube, client: str, service: str, reports: dict[str, dict[str, Any]]) -> None:
    """Kill all processes of a pod, and delete one by force: only its requests fail, soon and clearly, and retries mend most.

    The two drivers share the rate.
    """
    kills: dict[str, list[float]] = {"kill": [], "kill, with retries": []}
    with (
        traffic(kube, client, "kill", reports, replicas=2, rate=RATE / 2) as run,
        traffic(kube, client, "kill, with retries", reports, replicas=2, rate=RATE / 2, retries=2) as retried,
    ):
        for _ in run.rounds(SHARE):
            for how in KILLS if TOTAL_REQUESTS else KILLS[:1]:
                for each, moments in zip((run, retried), kills.values(), strict=True):
                    each.mark(how)
                    moments.append(each.report()["seconds"])
                kill(kube, pods(kube)[0]["metadata"]["name"], how)
                wait_settled(kube)
    check(reports["kill"], failures={Failure.CONNECT, Failure.BEFORE, Failure.AFTER})
    # Two retries, after half a second and a second, end before the endpoint is gone where the machine is slow. A request
    # without a byte fails only if they were used up at one kill and the pod of its last attempt fell to the next one.
    check(reports["kill, with retries"], failures={Failure.CONNECT, Failure.BEFORE, Failure.AFTER})
    for name, moments in kills.items():
        for error in reports[name]["errors"]:
            failed_at = error["at_seconds"] + error["after_seconds"]
            assert any(0 < failed_at - moment < NOTICE_SECONDS for moment in moments), (moments, error)
            if error["failure"] == Failure.BEFORE and reports[name]["retries"]:
                earliest = error["at_seconds"] - NOTICE_SECONDS
                assert sum(earliest < moment < failed_at for moment in moments) > 1, (moments, error)


def kill(kube: Kube, name: str, how: str) -> None:
    """Kill a pod."""
    if how == KILLS[1]:
        kube.run("delete", "pod", name, "--force", "--grace-period=0")
        return
    before = restarts(kube, name)
    # The first process of a container survives signals from inside; it ends because it lost all of the others.
    kube.execute(name, "sh", "-c", "kill -9 -1")
    wait(lambda: restarts(kube, name) > before, timeout_seconds=60)


def restarts(kube: Kube, name: str) -> int:
    """Return the number of times that a pod's container was restarted."""
    pod = kube.get("pod", name)
    assert pod is not None
    count: int = pod["status"]["containerStatuses"][0]["restartCount"]
    return count


@pytest.fixture
def changed_model(kube: Kube, client: str, service: str) -> str:
    """The URI of the changed model in a claim, with its right answers recorded."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    user = {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "fsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    kube.apply(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "models"}, "spec": spec},
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "models"},
            "spec": {
                "restartPolicy": "Never",
                "automountServiceAccountToken": False,
                "securityContext": user,
                "volumes": [{"name": "models", "persistentVolumeClaim": {"claimName": "models"}}],
                "containers": [
                    {
                        "name": "models",
                        "image": tool("image", "runtime"),
                        "command": ["python3", "-c", CHANGE_WEIGHTS],
                        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                        "securityContext": security,
                    }
                ],
            },
        },
    )
    kube.run(
        "wait",
        "--for=jsonpath={.status.phase}=Succeeded",
        "pod/models",
        "--timeout=120s",
        timeout_seconds=150,
    )
    uri = f"pvc://models/{CHANGED}"
    kube.apply(inference_service(NEXT, model={"uri": uri, "name": MODEL}, runtime=RUNTIME))
    kube.wait_ready(NEXT)
    TrafficRun(kube, client).record(f"http://{NEXT}", MODEL, CHANGED)
    kube.run("delete", "infsvc", NEXT, "--timeout=60s")
    return uri


@pytest.mark.traffic
def test_an_edit_of_the_model(
    kube: Kube, client: str, changed_model: str, reports: dict[str, dict[str, Any]]
) -> None:
    """Every answer is one of the old model's or one of the new one's, and after the rollout all are the new one's."""
    with traffic(kube, client, "edit of the model", reports, revisions=(DEMO, CHANGED)) as run:
        for _ in run.rounds(SHARE):
            for window, uri in (
                ("rollout", changed_model),
                ("serving the new model", ""),
                ("rollback", "demo://"),
            ):
                run.mark(window)
                if uri:
                    patch(kube, model={"uri": uri})
                    wait_settled(kube)
                else:
                    time.sleep(QUIET_SECONDS)
    report = reports["edit of the model"]
    check(report)
    answered = {window["name"]: set(window["revisions"]) for window in report["windows"]}
    assert DEMO in answered["before"] and CHANGED not in answered["before"]
    assert CHANGED in answered["serving the new model"] and DEMO not in answered["serving the new model"]
    assert DEMO in answered["after"] and CHANGED not in answered["after"]


@contextlib.contextmanager
def second_name(one_node: OneNode, image: str) -> Iterator[str]:
    """Give an image of the node a second name for the length of a with-block."""
    name = f"{image}-again"
    one_node.tag(image, name)
    yield name
    one_node.forget(name, None)


@pytest.mark.traffic
def test_an_edit_of_the_image(
    kube: Kube, client: str, service: str, one_node: OneNode, reports: dict[str, dict[str, Any]]
) -> None:
    with (
        second_name(one_node, tool("image", "runtime")) as image,
        traffic(kube, client, "edit of the image", reports) as run,
    ):
        for _ in run.rounds(SHARE):
            for window, name in (("rollout", image), ("rollback", None)):
                run.mark(window)
                patch(kube, runtime={"image": name})
                wait_settled(kube)
    check(reports["edit of the image"])


@pytest.mark.traffic
def test_an_operator_killed_in_a_rollout(
    kube: Kube, client: str, service: str, operator: Kube, reports: dict[str, dict[str, Any]]
) -> None:
    with traffic(kube, client, "operator killed", reports) as run:
        for number in run.rounds(SHARE):
            run.mark("rollout without the operator")
            patch(kube, runtime={"args": [f"--max-running-requests={96 + number}"]})
            operator.run("delete", "pods", "-l", OPERATOR_PODS, "--force", "--grace-period=0")
            wait_settled(kube)
    check(reports["operator killed"])


@pytest.mark.traffic
def test_helm_upgrade_and_rollback(
    kube: Kube,
    client: str,
    service: str,
    helm: Helm,
    operator: Kube,
    one_node: OneNode,
    reports: dict[str, dict[str, Any]],
) -> None:
    """Upgrade the operator to another image and other arguments, and roll back. No serving pod is replaced."""
    release = [RELEASE, "--namespace", operator.namespace, "--wait", "--timeout", "4m"]
    with (
        second_name(one_node, tool("image", "operator")) as image,
        traffic(kube, client, "helm upgrade and rollback", reports) as run,
    ):
        values = f"image.tag={image.rpartition(':')[2]},logLevel=debug,workers=4"
        before = [pod["metadata"]["uid"] for pod in pods(kube)]
        for _ in run.rounds(SHARE):
            run.mark("helm upgrade")
            helm.run("upgrade", *release, str(CHART), "--reuse-values", "--set", values)
            wait_for_operator(operator)
            wait_settled(kube)
            run.mark("helm rollback")
            helm.run("rollback", *release)
            wait_for_operator(operator)
            wait_settled(kube)
    check(reports["helm upgrade and rollback"])
    assert [pod["metadata"]["uid"] for pod in pods(kube)] == before


@pytest.mark.traffic
def test_without_an_api_server(
    kube: Kube, client: str, service: str, one_node: OneNode, reports: dict[str, dict[str, Any]]
) -> None:
    """Stop the API server and etcd; afterwards the operator carries out an edit."""
    daemons = [one_node.daemon(name) for name in ("kube-apiserver", "etcd")]
    with traffic(kube, client, "no API server", reports) as run:
        for number in run.rounds(SHARE):
            run.mark("API server stopped")
            try:
                for daemon in daemons:
                    daemon.pause()
                time.sleep(WITHOUT_API_SECONDS)
            finally:
                for daemon in reversed(daemons):
                    daemon.resume()
            wait(lambda: answers(kube), timeout_seconds=60)
            run.mark("API server back, rollout")
            patch(kube, runtime={"args": [f"--max-running-requests={128 + number}"]})
            wait_settled(kube)
    check(reports["no API server"])


def answers(kube: Kube) -> bool:
    """Return whether the API server answers."""
    try:
        return bool(kube.list("nodes"))
    except KubectlError:
        return False
