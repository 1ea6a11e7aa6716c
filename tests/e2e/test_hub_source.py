"""An hf:// model, downloaded once by an init container into a claim, from a stand-in of the hub in the cluster."""

from collections.abc import Iterator

import pytest
from hub_in_cluster import MODEL, running_hub, stop_hub
from kube import Kube, Object, inference_service, wait

PODS = "serving.skiff.dev/inferenceservice=fetched"


@pytest.fixture(scope="module")
def hub(kube: Kube) -> Iterator[str]:
    """The stand-in's URL."""
    with running_hub(kube) as url:
        yield url


def replaces(pod: Object, before: Object) -> bool:
    """Return whether this is another pod, and Ready."""
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
    return pod["metadata"]["name"] != before["metadata"]["name"] and conditions.get("Ready") == "True"


def test_it_is_fetched_once_and_served(kube: Kube, hub: str) -> None:
    runtime = {"device": "cpu", "env": [{"name": "HF_ENDPOINT", "value": hub}]}
    kube.apply(
        inference_service("fetched", model={"uri": f"hf://{MODEL}"}, runtime=runtime, cache={"size": "1Gi"})
    )
    kube.wait_ready("fetched")
    (pod,) = kube.list("pods", PODS)
    assert "fetch_finished" in kube.run("logs", pod["metadata"]["name"], "-c", "fetch")
    # The hub is gone, the pod starts again from the claim alone.
    stop_hub(kube)
    kube.run("delete", "pod", pod["metadata"]["name"])
    wait(
        lambda: [replaces(each, pod) for each in kube.list("pods", PODS)] == [True],
        timeout_seconds=120,
        explain=lambda: kube.run("describe", "pods", "-l", PODS),
    )
    kube.wait_ready("fetched", timeout_seconds=30)  # the operator reports the pod soon after the kubelet does
    kube.run("delete", "infsvc", "fetched", "--timeout=60s")


def test_a_download_that_fails_is_named(kube: Kube, operator: Kube) -> None:
    env = [{"name": "HF_ENDPOINT", "value": "http://127.0.0.1:9"}]
    kube.apply(
        inference_service("unfetched", model={"uri": f"hf://{MODEL}"}, runtime={"device": "cpu", "env": env})
    )
    wait(
        lambda: kube.condition("unfetched").get("reason") == "WeightsDownloadFailed",
        timeout_seconds=240,
        explain=lambda: str(kube.condition("unfetched")),
    )
    kube.run("delete", "infsvc", "unfetched", "--timeout=60s")
