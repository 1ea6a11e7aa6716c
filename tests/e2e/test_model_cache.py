"""ModelCaches on a real node and on a claim: one download serves all pods, is prefetched where wanted, and is removed with its cache."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helm import CHART, RELEASE, Helm
from hub_in_cluster import MODEL, deliveries, running_hub
from kube import Kube, Object, inference_service, wait
from operator_installation import OPERATOR_NAMESPACE

from skiff_runtime import contract

OTHER = "skiff-e2e-other"
HOST_PATH = "/run/skiff-e2e-models"
API_VERSION = "serving.skiff.dev/v1alpha1"


@pytest.fixture(scope="module")
def caches(helm: Helm, operator: Kube) -> Iterator[None]:
    """The operator with ModelCaches, which other tests do without."""
    for enabled in ("true", "false"):
        words = ["--namespace", OPERATOR_NAMESPACE, "--wait", "--reuse-values"]
        helm.run("upgrade", RELEASE, str(CHART), *words, "--set", f"modelCache.enabled={enabled}")
        if enabled == "true":
            yield


@pytest.fixture(scope="module")
def other(operator: Kube) -> Iterator[Kube]:
    """Another namespace under the restricted Pod Security level."""
    made = Kube(OTHER)
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    made.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": OTHER, "labels": restricted}})
    wait(lambda: made.get("serviceaccount", "default") is not None, timeout_seconds=30)
    yield made
    made.run("delete", "namespace", OTHER, "--timeout=120s", timeout_seconds=150)


@pytest.fixture
def hub(kube: Kube) -> Iterator[str]:
    """The URL of a hub that has delivered nothing yet."""
    with running_hub(kube) as url:
        yield url


def model_cache(name: str, hub: str, **storage: Any) -> Object:
    """The demo model on all nodes, or on a claim."""
    spec = {
        "model": {"uri": f"hf://{MODEL}"},
        "storage": storage,
        "env": [{"name": "HF_ENDPOINT", "value": hub}],
    }
    return {"apiVersion": API_VERSION, "kind": "ModelCache", "metadata": {"name": name}, "spec": spec}


def wait_complete(kube: Kube, name: str) -> Object:
    """Wait until every node, or the claim, has the model; the status then."""
    found: Object = {}

    def complete() -> bool:
        found.clear()
        found.update((kube.get("modelcache", name) or {}).get("status", {}))
        return [each["status"] for each in found.get("conditions", [])] == ["True"]

    wait(complete, timeout_seconds=180, explain=lambda: json.dumps(found))
    return found


def wait_gone(kube: Kube, kind: str, name: str) -> None:
    wait(
        lambda: kube.get(kind, name) is None,
        timeout_seconds=180,
        explain=lambda: str(kube.get(kind, name)),
    )


def test_two_namespaces_serve_one_download(caches: None, kube: Kube, other: Kube, hub: str) -> None:
    kube.apply(model_cache("demo", hub, hostPath=HOST_PATH))
    status = wait_complete(kube, "demo")
    assert status["readyNodes"] == status["nodes"] >= 1 and status["sizeBytes"] > 0
    runtime = {"device": "cpu", "env": [{"name": "HF_ENDPOINT", "value": hub}]}
    users = ((kube, "one"), (other, "two"))
    for namespace, name in users:
        namespace.apply(inference_service(name, model={"uri": f"hf://{MODEL}"}, runtime=runtime))
    for namespace, name in users:
        namespace.wait_ready(name)
    counts = deliveries(kube)
    assert counts and set(counts.values()) == {1}, counts
    # It stays while it is used.
    kube.run("delete", "modelcache", "demo", "--wait=false")
    wait(
        lambda: (kube.get("modelcache", "demo") or {})["status"]["conditions"][0]["reason"] == "InUse",
        timeout_seconds=60,
        explain=lambda: str(kube.get("modelcache", "demo")),
    )
    for namespace, name in users:
        assert namespace.is_ready(name)
        namespace.run("delete", "infsvc", name, "--timeout=60s")
    wait_gone(kube, "modelcache", "demo")
    # The files are gone from the node, for another one downloads them again.
    kube.apply(model_cache("demo", hub, hostPath=HOST_PATH))
    wait_complete(kube, "demo")
    assert set(deliveries(kube).values()) == {2}
    kube.run("delete", "modelcache", "demo", "--timeout=120s", timeout_seconds=150)


def test_a_claim_that_is_made_is_filled_once_and_deleted_with_its_cache(
    caches: None, kube: Kube, hub: str
) -> None:
    kube.apply(model_cache("shared", hub, claim={"namespace": kube.namespace, "size": "1Gi"}))
    claim = "skiff-model.shared"
    status = wait_complete(kube, "shared")
    assert status["nodes"] == status["readyNodes"] == 1 and status["sizeBytes"] > 0
    assert (kube.get("pvc", claim) or {})["spec"]["accessModes"] == ["ReadWriteMany"]
    runtime = {"device": "cpu", "env": [{"name": "HF_ENDPOINT", "value": hub}]}
    kube.apply(inference_service("one", model={"uri": f"hf://{MODEL}"}, replicas=2, runtime=runtime))
    kube.wait_ready("one")
    counts = deliveries(kube)
    assert counts and set(counts.values()) == {1}, counts
    pods = kube.list("pod", f"{contract.LABEL_SERVICE}=one")
    assert len(pods) == 2
    for pod in pods:
        mounted = [
            each["persistentVolumeClaim"]
            for each in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in each
        ]
        assert mounted == [{"claimName": claim, "readOnly": True}]
    kube.run("delete", "infsvc", "one", "--timeout=60s")
    kube.run("delete", "modelcache", "shared", "--timeout=120s", timeout_seconds=150)
    wait_gone(kube, "pvc", claim)


def test_a_model_is_prefetched_for_a_service_without_pods(caches: None, kube: Kube, hub: str) -> None:
    runtime = {"device": "cpu", "env": [{"name": "HF_ENDPOINT", "value": hub}]}
    wanted = {
        "model": {"uri": f"hf://{MODEL}", "endpoint": hub},
        "cache": {"prefetch": True},
        "runtime": runtime,
    }
    kube.apply(inference_service("later", replicas=0, **wanted))
    wait(lambda: len(kube.list("modelcache")) == 1, timeout_seconds=60)
    [made] = kube.list("modelcache")
    name = made["metadata"]["name"]
    assert name.startswith("prefetch-")
    wait_complete(kube, name)
    assert kube.list("pod", f"{contract.LABEL_SERVICE}=later") == []
    before = deliveries(kube)
    assert before and set(before.values()) == {1}, before
    kube.apply(inference_service("later", replicas=1, **wanted))
    kube.wait_ready("later")
    assert deliveries(kube) == before
    kube.run("delete", "infsvc", "later", "--timeout=60s")
    kube.run("delete", "modelcache", name, "--timeout=120s", timeout_seconds=150)
