"""ModelCaches against a real API server: the fan-out over nodes, use by InferenceServices, and removal."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer, Refused
from controlplane import ControlPlane
from helm import Helm
from installation import Installation
from operator_process import OperatorProcess, eventually
from play_kubelet import TIME
from services import hub, raw

from skiff_runtime import contract

NAMESPACE = "skiff-caches"
POOL = {"pool": "model-caches"}
URI = hub()["uri"]
BUCKET = "s3://models/llama"
COMMIT = "c" * 40
FAST = ("--status-delay-seconds", "0.1", "--resync-seconds", "1")


@pytest.fixture(scope="module")
def installation(server: ApiServer, plane: ControlPlane) -> Installation:
    """A release that serves ModelCaches."""
    server.in_namespace(NAMESPACE).create_namespace()
    installed = Installation(
        server, plane.kubeconfig, Helm().render("modelCache.enabled=true", namespace=NAMESPACE)
    )
    installed.apply()
    return installed


@pytest.fixture
def caches(installation: Installation, server: ApiServer, tmp_path: Path) -> Iterator[OperatorProcess]:
    """The operator, running."""
    with installation.operator(tmp_path, "caches", *FAST) as process:
        yield process
        tracebacks = [line for line in process.log.read_text().splitlines() if '"traceback"' in line]
        assert not tracebacks, tracebacks
        assert "forbidden" not in process.log.read_text()


@pytest.fixture
def nodes(server: ApiServer, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Three nodes of the pool that are ready, one that is tainted, and one outside of it.

    No two tests use the same names: the node controller would judge the second node by the heartbeat of the first.
    """
    prefix = f"cache-{request.node.name[5:13].replace('_', '-')}"
    names = [f"{prefix}-{name}" for name in "abcde"]
    for name in names:
        labels = POOL if name != names[4] else {}
        taints = [{"key": "other", "effect": "NoSchedule"}] if name == names[3] else []
        body = {"metadata": {"name": name, "labels": labels}, "spec": {"taints": taints}}
        server.create("nodes", body)
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": TIME, "lastTransitionTime": TIME}
        server.merge("nodes", name, {"status": {"conditions": [ready]}}, "status")
        # Where nothing runs the node's controllers fast enough, the taint of a node that is not ready stays.
        server.merge("nodes", name, {"spec": {"taints": taints}})
    yield names[:3]
    for name in names:
        server.delete("nodes", name)


class Kubelet:
    """The kubelet of the fetchers, and their servers, which report what `reports` says by address."""

    def __init__(self, api: ApiServer, cache: str = "llama", *, network: int = 81) -> None:
        self._api = api
        self._cache = cache
        self._network = network
        self._reports: dict[str, dict[str, Any]] = {}
        self._addresses: dict[str, str] = {}

    def pods(self, task: str) -> dict[str, Any]:
        """Live pods of a task, by node."""
        labels = f"{contract.LABEL_MODEL_CACHE}={self._cache},serving.skiff.dev/task={task}"
        found = self._api.list("pods", labels)
        alive = [each for each in found if "deletionTimestamp" not in each["metadata"]]
        return {each["metadata"]["annotations"]["serving.skiff.dev/node"]: each for each in alive}

    def start(self, pod: Any, received: int, *, ready: bool) -> str:
        """Run the pod at an address of its own; return its URL."""
        name = pod["metadata"]["name"]
        address = self._addresses.setdefault(name, f"127.{self._network}.0.{len(self._addresses) + 1}")
        state = "complete" if ready else "fetching"
        report = {
            "state": state,
            "received_bytes": received,
            "total_bytes": 200,
            "commit": COMMIT if ready else "",
        }
        if address not in self._reports:
            self._serve(address)
        self._reports[address] = report
        fixed = {"name": "fetch", "image": "i", "imageID": "", "restartCount": 0}
        status = {
            "phase": "Running",
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": TIME}],
            "containerStatuses": [{**fixed, "ready": ready, "state": {"running": {"startedAt": TIME}}}],
        }
        self._api.merge("pods", name, {"status": status}, "status")
        return f"http://{address}:{contract.PEER_PORT}"

    def succeed(self, pod: Any) -> None:
        """End a pod with success."""
        self._api.merge("pods", pod["metadata"]["name"], {"status": {"phase": "Succeeded"}}, "status")

    def _serve(self, address: str) -> None:
        kubelet = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path == contract.PATH_PEER_STATUS and "Authorization" not in self.headers
                body = json.dumps(kubelet._reports[address]).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        server = http.server.ThreadingHTTPServer((address, contract.PEER_PORT), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()


def status(server: ApiServer, name: str = "llama") -> Any:
    """The status of the cache; empty before the first."""
    return server.get("modelcaches", name).get("status", {})


def condition(server: ApiServer, name: str = "llama") -> str:
    """The reason of its condition."""
    return next((each["reason"] for each in status(server, name).get("conditions", [])), "")


def manifest(name: str = "llama", **fields: Any) -> dict[str, Any]:
    """A ModelCache as an administrator would write it."""
    api_version = f"{contract.API_GROUP}/{contract.API_VERSION}"
    spec = {"model": {"uri": URI}, "nodeSelector": POOL, **fields}
    return {"apiVersion": api_version, "kind": "ModelCache", "metadata": {"name": name}, "spec": spec}


def create_service(api: ApiServer, name: str, **fields: Any) -> None:
    """An InferenceService of the cache's model."""
    body = raw(name, **{"model": hub(), "runtime": {"device": "cpu"}, **fields})
    body["metadata"] = {"name": name}
    api.create("inferenceservices", body)


def fetch_arguments(deployment: Any) -> list[str]:
    """Arguments of the init container."""
    words: list[str] = deployment["spec"]["template"]["spec"]["initContainers"][0]["args"]
    return words


def test_the_life_of_a_model_cache(
    caches: OperatorProcess, server: ApiServer, api: ApiServer, nodes: list[str]
) -> None:
    own = server.in_namespace(NAMESPACE)
    kubelet = Kubelet(own)
    create_service(api, "before")  # it runs without a cache, and goes on so
    eventually(lambda: api.find("deployments", "before"), "the service runs")
    server.create("modelcaches", manifest())

    # One node reads the source, and the others wait.
    eventually(lambda: kubelet.pods("fetch").keys() == {nodes[0]}, "the seed")
    seed = kubelet.pods("fetch")[nodes[0]]
    assert contract.FLAG_PEER not in seed["spec"]["containers"][0]["args"]
    assert seed["spec"]["volumes"][0]["hostPath"]["path"] == "/var/lib/skiff/models/llama"
    secret = seed["spec"]["containers"][0]["env"][1]["valueFrom"]["secretKeyRef"]["name"]
    assert own.get("secrets", secret)["metadata"]["ownerReferences"][0]["kind"] == "ModelCache"
    kubelet.start(seed, 80, ready=False)
    progress = {"node": nodes[0], "state": "Fetching", "receivedBytes": 80, "totalBytes": 200, "percent": 40}
    eventually(lambda: progress in status(server).get("incomplete", []), "the progress")
    assert kubelet.pods("fetch").keys() == {nodes[0]} and condition(server) == "Fetching"

    # Each node that has the model sends it to one more.
    urls = [kubelet.start(seed, 200, ready=True)]
    for node in nodes[1:]:
        eventually(lambda: kubelet.pods("fetch").get(node), f"the fetcher of {node}")  # noqa: B023
        pod = kubelet.pods("fetch")[node]
        words = pod["spec"]["containers"][0]["args"]
        peers = [words[i + 1] for i, word in enumerate(words) if word == contract.FLAG_PEER]
        assert peers and set(peers) <= set(urls)
        urls.append(kubelet.start(pod, 200, ready=True))
    eventually(lambda: condition(server) == "Ready", "all nodes have it")
    found = status(server)
    assert (found["nodes"], found["readyNodes"], found["sizeBytes"]) == (3, 3, 200)
    assert found["commit"] == COMMIT and found["users"] == 0 and found["unusedSince"]

    # An edit replaces the fetchers one by one: the next when the last one is ready.
    server.merge("modelcaches", "llama", {"spec": {"env": [{"name": "HTTPS_PROXY", "value": "http://p"}]}})

    def replaced() -> bool:
        pods = kubelet.pods("fetch").values()
        edited = [each for each in pods if len(each["spec"]["containers"][0]["env"]) == 3]
        assert len([each for each in pods if "podIP" in each["status"]]) >= len(nodes) - 1
        for each in edited:
            if "podIP" not in each["status"]:
                kubelet.start(each, 200, ready=True)
        return len(edited) == len(nodes)

    eventually(replaced, "all fetchers are edited")
    eventually(lambda: condition(server) == "Ready", "all nodes have it again")

    # An InferenceService mounts it, read-only, and downloads nothing.
    create_service(api, "after")
    claim = "after.skiff-model.llama"
    eventually(
        lambda: (api.find("persistentvolumeclaims", claim) or {}).get("status", {}).get("phase") == "Bound",
        "the claim is bound",
    )
    deployment = eventually(lambda: api.find("deployments", "after"), "the deployment")
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}} in volumes
    assert contract.FLAG_WAIT in fetch_arguments(deployment)
    bound = api.get("persistentvolumeclaims", claim)["spec"]["volumeName"]
    live = server.get("persistentvolumes", bound)["spec"]
    assert live["hostPath"]["path"] == "/var/lib/skiff/models/llama"
    (term,) = live["nodeAffinity"]["required"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "pool", "operator": "In", "values": ["model-caches"]}]
    eventually(lambda: status(server)["users"] == 1 and "unusedSince" not in status(server), "it is in use")

    # Not even a pod of the namespace's users may write to it.
    eventually(lambda: "set persistentVolumeClaim.readOnly" in refusal(api, claim), "the policy is in force")
    assert refusal(api, claim, readOnly=True) == ""

    # A start of the operator, and an edit that keeps the model, choose no other cache.
    versions = {
        name: api.get("deployments", name)["metadata"]["resourceVersion"] for name in ("before", "after")
    }
    caches.stop()
    caches.start()
    for name in ("before", "after"):
        api.merge("inferenceservices", name, {"spec": {"replicas": 0}})
        eventually(lambda: api.get("deployments", name)["spec"]["replicas"] == 0, "scaled")  # noqa: B023
    assert all(
        api.get("deployments", name)["metadata"]["resourceVersion"] > versions[name] for name in versions
    )
    assert contract.FLAG_WAIT not in fetch_arguments(api.get("deployments", "before"))
    assert api.get("deployments", "after")["spec"]["template"] == deployment["spec"]["template"]

    # It stays while it is in use, and then goes from each node.
    server.delete("modelcaches", "llama")
    eventually(lambda: condition(server) == "InUse", "it is in use")
    assert kubelet.pods("fetch").keys() == set(nodes)
    api.delete("inferenceservices", "after")

    # Pods without a node are gone at once.
    eventually(lambda: kubelet.pods("remove").keys() == set(nodes), "each node removes it", 90)
    assert server.find("persistentvolumes", bound) is None and not lost(server)
    for pod in kubelet.pods("remove").values():
        kubelet.succeed(pod)
    eventually(lambda: lost(server), "it is removed")


def refusal(api: ApiServer, claim: str, **source: Any) -> str:
    """Return why the API server refuses a pod that mounts the claim; empty if it does not."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    body = {
        "metadata": {"name": "writer"},
        "spec": {
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{"name": "a", "image": "a", "securityContext": security}],
            "volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": claim, **source}}],
        },
    }
    try:
        api.request("POST", f"{api.path('pods')}?dryRun=All", body)
    except Refused as refused:
        return refused.message
    return ""


def lost(server: ApiServer) -> bool:
    """Return whether the cache is gone."""
    return server.find("modelcaches", "llama") is None


def test_an_unused_cache_expires(caches: OperatorProcess, server: ApiServer) -> None:
    """On no node at all, so that nothing has to be removed."""
    server.create("modelcaches", manifest(nodeSelector={"pool": "none"}, retentionSeconds=0))
    eventually(lambda: lost(server), "it is gone")


def claim_cache(api: ApiServer, **claim: str) -> dict[str, Any]:
    """A ModelCache of a bucket on a claim of the namespace."""
    model = {"uri": BUCKET, "endpoint": "http://minio:9000", "credentialsSecretRef": {"name": "keys"}}
    storage = {"claim": {"namespace": api.namespace, **claim}}
    return manifest("shared", model=model, storage=storage, nodeSelector={})


def test_the_life_of_a_shared_claim(caches: OperatorProcess, server: ApiServer, api: ApiServer) -> None:
    """One fetcher in the claim's namespace, which may forbid everything but restricted pods."""
    kubelet = Kubelet(api, "shared", network=82)
    server.create("modelcaches", claim_cache(api, claimName="models"))
    eventually(lambda: condition(server, "shared") == "NoClaim", "no claim")
    spec = {"accessModes": ["ReadWriteMany"], "storageClassName": "", "resources": {"requests": {"storage": "1Gi"}}}  # fmt: skip
    api.create("persistentvolumeclaims", {"metadata": {"name": "models"}, "spec": spec})
    place = f"{api.namespace}/models"
    eventually(lambda: kubelet.pods("fetch").keys() == {place}, "its fetcher")
    pod = kubelet.pods("fetch")[place]
    kubelet.start(pod, 80, ready=False)
    progress = {"node": place, "state": "Fetching", "receivedBytes": 80, "totalBytes": 200, "percent": 40}
    eventually(lambda: progress in status(server, "shared").get("incomplete", []), "the progress")
    kubelet.start(pod, 200, ready=True)
    eventually(lambda: condition(server, "shared") == "Ready", "the claim has it")
    found = status(server, "shared")
    assert (found["nodes"], found["readyNodes"], found["sizeBytes"]) == (1, 1, 200)

    # InferenceServices of its namespace mount it; those of another one do not.
    model = {"uri": BUCKET, "endpoint": "http://minio:9000"}
    other = server.in_namespace(f"{api.namespace[:50]}-2")
    other.create_namespace()
    for namespace in (api, other):
        create_service(namespace, "user", model=model)
    deployments = [
        eventually(lambda: each.find("deployments", "user"), "the deployment")  # noqa: B023
        for each in (api, other)
    ]
    mounted, elsewhere = (fetch_arguments(each) for each in deployments)
    assert contract.FLAG_WAIT in mounted and contract.FLAG_WAIT not in elsewhere
    eventually(lambda: status(server, "shared")["users"] == 1, "it is in use")
    assert api.find("persistentvolumeclaims", "user.skiff-model.shared") is None

    # A rollout to another model does not remove it before its pods are gone, nor does a restart of the operator.
    caches.stop()
    caches.start()
    server.delete("modelcaches", "shared")
    eventually(lambda: condition(server, "shared") == "InUse", "it is in use")
    template = deployments[0]["spec"]["template"]
    annotations = {"serving.skiff.dev/model-cache": "shared"}
    assert template["metadata"]["annotations"] == annotations
    assert api.get("deployments", "user")["spec"]["template"] == template
    api.delete("inferenceservices", "user")
    eventually(lambda: not kubelet.pods("fetch"), "nothing mounts it", 90)
    # The claim was never bound here, so no pod could remove anything from it: it is not waited for.
    eventually(lambda: server.find("modelcaches", "shared") is None, "it is removed")
    assert api.get("persistentvolumeclaims", "models"), "it is the user's"


def test_a_claim_that_was_made_goes_with_its_cache(
    caches: OperatorProcess, server: ApiServer, api: ApiServer
) -> None:
    server.create("modelcaches", claim_cache(api, size="1Gi", storageClassName="nfs"))
    found = eventually(lambda: api.find("persistentvolumeclaims", "skiff-model.shared"), "the claim is made")
    assert found["spec"]["storageClassName"] == "nfs" and found["spec"]["accessModes"] == ["ReadWriteMany"]
    eventually(lambda: Kubelet(api, "shared").pods("fetch"), "the fetcher")
    server.delete("modelcaches", "shared")
    eventually(lambda: server.find("modelcaches", "shared") is None, "nothing has to be removed from it")
    eventually(
        lambda: api.find("persistentvolumeclaims", "skiff-model.shared") is None, "it is collected", 60
    )


def test_prefetch_makes_a_cache_that_outlives_its_services_for_a_while(
    caches: OperatorProcess, server: ApiServer, api: ApiServer, nodes: list[str]
) -> None:
    model = {"uri": BUCKET}
    # The taint of nodes that are not ready is gone some time after they are, and a list of nodes is used for a minute.
    new = [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}]
    pool = {"nodeSelector": POOL, "tolerations": new}
    for name in ("one", "two"):
        create_service(api, name, model=model, cache={"prefetch": True}, replicas=0, **pool)
    found = eventually(lambda: server.list("modelcaches"), "it is made")
    [cache] = found
    name = cache["metadata"]["name"]
    assert cache["spec"]["model"] == model and cache["spec"]["retentionSeconds"] == 86_400
    assert "ownerReferences" not in cache["metadata"]
    kubelet = Kubelet(server.in_namespace(NAMESPACE), name, network=83)
    eventually(lambda: kubelet.pods("fetch").keys() == {nodes[0]}, "it is fetched without any replica")
    for user in ("one", "two"):
        claim = f"{user}.skiff-model.{name}"
        eventually(lambda: api.find("persistentvolumeclaims", claim), "it is mounted")  # noqa: B023
    eventually(lambda: status(server, name).get("users") == 2, "both use it")
    # It is kept while one refers to it, and then until its retention is over.
    server.merge("modelcaches", name, {"spec": {"retentionSeconds": 0}})
    api.delete("inferenceservices", "one")
    eventually(lambda: status(server, name)["users"] == 1, "one uses it")
    assert "deletionTimestamp" not in server.get("modelcaches", name)["metadata"]
    api.delete("inferenceservices", "two")
    eventually(lambda: kubelet.pods("remove").keys() == set(nodes), "each node removes it", 90)
    for pod in kubelet.pods("remove").values():
        kubelet.succeed(pod)
    eventually(lambda: server.find("modelcaches", name) is None, "it is removed")


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": {}}, "spec.model.uri: Required value"),
    ({"model": {"uri": "demo://"}}, "must be hf://ORGANISATION/NAME"),
    ({"model": {"uri": "s3://b/a/../c"}}, "without '..'"),
    ({"model": {"uri": BUCKET, "revision": "v1"}}, "only hf:// models have revisions"),
    (
        {"model": {"uri": BUCKET, "credentialsSecretRef": {"name": "a", "key": "b"}}},
        "remove model.credentialsSecretRef.key",
    ),
    ({"model": {"uri": BUCKET, "endpoint": "http://u:p@h"}}, "spec.model.endpoint"),
    ({"storage": {"hostPath": "/a1", "claim": {"namespace": "a", "size": "1Gi"}}}, "not both"),
    ({"storage": {"claim": {"namespace": "a"}}}, "set claimName for an existing claim"),
    (
        {"storage": {"claim": {"namespace": "a", "claimName": "b", "storageClassName": "c"}}},
        "storageClassName is for a claim that is made",
    ),
    ({"model": {"uri": "hf://a/.."}}, "must be hf://ORGANISATION/NAME"),
    ({"model": {"uri": URI, "credentialsSecretRef": {"name": "a", "namespace": "b"}}}, "unknown field"),
    ({"storage": {"hostPath": "models"}}, "must be an absolute path"),
    ({"storage": {"hostPath": "/a/../etc"}}, "must be an absolute path"),
    ({"storage": {"hostPath": "/"}}, "must be an absolute path"),
    ({"env": [{"name": "A", "value": "1", "valueFrom": {}}]}, "set value or valueFrom, not both"),
    ({"retentionSeconds": -1}, "greater than or equal to 0"),
    ({"resources": {"limits": {"memory": "lots"}}}, "spec.resources.limits.memory"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_bad_specs_are_refused_with_advice(server: ApiServer, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused) as refusal:
        server.create("modelcaches", manifest("bad", **fields))
    assert message in refusal.value.message


@contextmanager
def refused(message: str) -> Iterator[None]:
    """The API server refuses with this advice."""
    with pytest.raises(Refused) as refusal:
        yield
    assert message in refusal.value.message


def test_what_volumes_and_directories_depend_on_cannot_change(server: ApiServer) -> None:
    with refused("at most 63"):
        server.create("modelcaches", manifest("a.b"))
    server.create("modelcaches", manifest("fixed"))
    for change, message in (
        ({"model": {"uri": "hf://a/b"}}, "uri and revision cannot change"),
        ({"model": {"revision": "v2"}}, "uri and revision cannot change"),
        ({"model": {"endpoint": "http://h"}}, "endpoint cannot change"),
        ({"storage": {"hostPath": "/other"}}, "hostPath cannot change"),
        ({"storage": {"claim": {"namespace": "a", "claimName": "b"}}}, "claim cannot change"),
        ({"nodeSelector": {"pool": "b"}}, "nodeSelector cannot change"),
        ({"nodeSelector": None}, "nodeSelector cannot change"),
    ):
        with refused(message):
            server.merge("modelcaches", "fixed", {"spec": change})
    server.merge(
        "modelcaches", "fixed", {"spec": {"retentionSeconds": 60, "tolerations": [{"operator": "Exists"}]}}
    )
    server.delete("modelcaches", "fixed")
