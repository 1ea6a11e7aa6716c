"""Rollouts where there is room and where there is none, and the pod that a scale-in takes.

The pods serve on the CPU; what is scarce is a device that the node only claims to have, as GPUs are scarce elsewhere.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from kube import Kube, KubectlError, Object, inference_service, wait

from skiff_runtime.contract import API_PORT

DEVICE = "example.com/device"
POINTER = "/status/capacity/example.com~1device"
NAME = "scarce"
SELECTOR = f"serving.skiff.dev/inferenceservice={NAME}"
AMOUNTS = {"cpu": "100m", "memory": "384Mi"}
ROOM_SECONDS = 11
"""After this time, the operator reads the nodes again."""


def set_devices(kube: Kube, count: int) -> None:
    """Pretend that the node has this many devices; the kubelet takes them over, and 0 removes them."""
    [node] = [each["metadata"]["name"] for each in kube.list("nodes")]
    change = (
        {"op": "add", "path": POINTER, "value": str(count)} if count else {"op": "remove", "path": POINTER}
    )
    kube.run("patch", "node", node, "--subresource=status", "--type=json", "-p", json.dumps([change]))
    wait(
        lambda: kube.list("nodes")[0]["status"]["allocatable"].get(DEVICE, "0") == str(count),
        timeout_seconds=60,
    )


@pytest.fixture(scope="module")
def one_device(kube: Kube) -> Iterator[None]:
    """A node with one device."""
    set_devices(kube, 1)
    yield
    kube.run("delete", "infsvc", NAME, "--ignore-not-found", "--timeout=60s")
    try:
        set_devices(kube, 0)
    except KubectlError as error:
        pytest.fail(str(error))


def scarce(**spec: Any) -> Object:
    """A service each of whose pods needs one device."""
    limits = {"memory": "2Gi", DEVICE: "1"}
    resources = {"requests": AMOUNTS, "limits": limits}
    return inference_service(NAME, resources=resources, drain={"timeoutSeconds": 10}, **spec)


def edit(kube: Kube, **spec: Any) -> None:
    """Merge into the spec."""
    kube.run("patch", "infsvc", NAME, "--type=merge", "-p", json.dumps({"spec": spec}))


def rolling_update(kube: Kube) -> dict[str, Any]:
    """The parameters of the Deployment's rolling update."""
    found = kube.get("deployment", NAME)
    assert found is not None
    parameters: dict[str, Any] = found["spec"]["strategy"]["rollingUpdate"]
    return parameters


def progressing(kube: Kube) -> str:
    """Reason and message of the condition."""
    found = kube.condition(NAME, "Progressing")
    return f"{found.get('reason')}: {found.get('message')}"


@pytest.mark.usefixtures("one_device")
def test_without_room_a_pod_is_replaced_and_it_is_said(kube: Kube) -> None:
    kube.apply(scarce())
    kube.wait_ready(NAME)
    edit(kube, runtime={"maxModelLen": 1024})
    said = (
        f"no room for a pod beside the old ones (needs 1 {DEVICE}, 0 free): "
        "the service is interrupted while its only pod is replaced"
    )
    wait(
        lambda: progressing(kube).startswith(f"ReplacingPods: {said}"),
        timeout_seconds=30,
        explain=lambda: progressing(kube),
    )
    assert rolling_update(kube) == {"maxSurge": 0, "maxUnavailable": 1}
    kube.wait_ready(NAME)
    notes = [each["message"] for each in kube.list("events") if each["reason"] == "ReplacingPods"]
    assert notes == [said]


def test_with_room_a_pod_comes_beside_and_what_blocks_it_is_named(kube: Kube, one_device: None) -> None:
    set_devices(kube, 2)
    time.sleep(ROOM_SECONDS)
    edit(kube, runtime={"image": "localhost/skiff/no-such-image:1"})
    began = time.monotonic()
    wait(
        lambda: (
            progressing(kube).startswith("RolloutBlocked: 0 of 1 pods") and "ImagePull" in progressing(kube)
        ),
        timeout_seconds=30,
        explain=lambda: progressing(kube),
    )
    print(f"named after {time.monotonic() - began:.1f} s: {progressing(kube)}")
    assert "Way out: correct runtime.image" in progressing(kube)
    assert rolling_update(kube) == {"maxSurge": 1, "maxUnavailable": 0}
    assert kube.condition(NAME, "Available")["status"] == "True"
    edit(kube, runtime={"image": None})
    kube.wait_ready(NAME)


def test_scale_in_takes_the_cold_pod(kube: Kube, client: str, one_device: None) -> None:
    edit(kube, replicas=2)
    wait(
        lambda: (kube.get("infsvc", NAME) or {})["status"].get("readyReplicas") == 2,
        timeout_seconds=180,
        explain=lambda: progressing(kube),
    )
    _, new = sorted(kube.list("pods", SELECTOR), key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
    chat = {"model": "skiff-demo", "messages": [{"role": "user", "content": "What is a pod?"}]}
    # Without costs the newer pod would go; it is the one that is warm.
    url = f"http://{new['status']['podIP']}:{API_PORT}/v1/chat/completions"
    headers = ["-H", "Content-Type: application/json"]
    kube.execute(client, "curl", "-sS", "--fail", url, *headers, "-d", json.dumps(chat))
    edit(kube, replicas=1)
    wait(
        lambda: [pod["metadata"]["name"] for pod in kube.list("pods", SELECTOR)] == [new["metadata"]["name"]],
        timeout_seconds=120,
        explain=lambda: str([pod["metadata"] for pod in kube.list("pods", SELECTOR)]),
    )
    [left] = kube.list("pods", SELECTOR)
    assert int(left["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"]) > 0
