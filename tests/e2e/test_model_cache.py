"""A ModelCache on a real node: InferenceServices of two namespaces serve one download, which is removed with it."""

import json
from collections.abc import Iterator

import pytest
from helm import CHART, RELEASE, Helm
from hub_in_cluster import MODEL, deliveries, start_hub
from kube import Kube, Object, inference_service, wait
from operator_installation import OPERATOR_NAMESPACE

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


def model_cache(hub: str) -> Object:
    """The demo model on all nodes."""
    spec = {
        "model": {"uri": f"hf://{MODEL}"},
        "storage": {"hostPath": HOST_PATH},
        "env": [{"name": "HF_ENDPOINT", "value": hub}],
    }
    return {"apiVersion": API_VERSION, "kind": "ModelCache", "metadata": {"name": "demo"}, "spec": spec}


def wait_complete(kube: Kube) -> Object:
    """Wait until every node has the model; the status then."""
    found: Object = {}

    def complete() -> bool:
        found.update((kube.get("modelcache", "demo") or {}).get("status", {}))
        return [each["status"] for each in found.get("conditions", [])] == ["True"]

    wait(complete, timeout_seconds=180, explain=lambda: json.dumps(found))
    return found


def test_two_namespaces_serve_one_download(caches: None, kube: Kube, other: Kube) -> None:
    hub = start_hub(kube)
    kube.apply(model_cache(hub))
    status = wait_complete(kube)
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
    wait(
        lambda: kube.get("modelcache", "demo") is None,
        timeout_seconds=180,
        explain=lambda: str(kube.get("modelcache", "demo")),
    )
    # The files are gone from the node, for another one downloads them again.
    kube.apply(model_cache(hub))
    wait_complete(kube)
    assert set(deliveries(kube).values()) == {2}
    kube.run("delete", "modelcache", "demo", "--timeout=120s", timeout_seconds=150)
    kube.run("delete", "pod", "hub", "--grace-period=0", "--force")
