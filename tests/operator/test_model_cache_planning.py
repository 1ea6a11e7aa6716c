"""The pure parts of ModelCaches: the fan-out over nodes, the choice by a service, failures with remedies, and the status."""

import asyncio
from typing import Any, cast

import pytest
from msgspec.structs import replace
from services import hub, service

from skiff_operator.cache import Cache
from skiff_operator.client import Client
from skiff_operator.errors import InvalidSpec, Retryable
from skiff_operator.model_caches import claim, fan_out, fetcher, nodes, prefetch, report, spec
from skiff_operator.model_caches.controller import ModelCacheController
from skiff_operator.model_caches.fetcher import ANNOTATION_GENERATION, FETCH, Fetcher
from skiff_operator.model_caches.index import Index, has_model
from skiff_operator.model_caches.report import Facts, Progress, Status
from skiff_operator.model_caches.spec import ModelCache
from skiff_operator.plan import objects
from skiff_operator.resources import model_cache_claim
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService, MountedCache
from skiff_operator.workload import read_pod, read_rollout
from skiff_runtime import contract

URI = hub()["uri"]
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:10:00Z"
SETTINGS = Settings(model_caches=True)
BUCKET = "s3://models/llama"
SHARED: dict[str, Any] = {"storage": {"claim": {"namespace": "default", "claimName": "models"}}}


def model_cache(name: str = "llama", *, deleting: bool = False, uri: str = URI, **fields: Any) -> ModelCache:
    """A parsed ModelCache."""
    model = {"uri": uri, **fields.pop("model", {})}
    meta = {"name": name, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "1"}
    if deleting:
        meta["deletionTimestamp"] = NOW
    if fields.pop("managed", False):
        meta["labels"] = {contract.LABEL_MANAGED_BY: "skiff-operator"}
    return spec.parse({"metadata": meta, "spec": {"model": model, **fields}})


def made(node: str, **fields: Any) -> Fetcher:
    """A fetcher of a node."""
    defaults = {
        "name": f"f-{node}",
        "uid": f"u-{node}",
        "task": FETCH,
        "generation": 1,
        "address": f"10.0.0.{node}",
    }
    return Fetcher(**{**defaults, "node": node, **fields})


def test_the_number_of_nodes_that_have_a_model_doubles() -> None:
    names = [f"{i:02}" for i in range(10)]
    fetchers: list[Fetcher] = []
    rounds = []
    sources = 0
    while len(fetchers) < len(names):
        starts = fan_out.next_starts(names, fetchers)
        rounds.append(len(starts))
        sources += sum(not start.peers for start in starts)
        senders = [start.peers[0].node for start in starts if start.peers]
        assert len(set(senders)) == len(senders), "each node sends to one at a time"
        assert all(len(start.peers) <= fan_out.PEERS for start in starts)
        busy = [*fetchers, *(made(start.node) for start in starts)]
        assert fan_out.next_starts(names, busy) == [], "the next round waits for this one"
        fetchers += [made(start.node, ready=True) for start in starts]
    assert rounds == [1, 1, 2, 4, 2] and sources == 1


def test_a_seed_that_fails_does_not_hold_up_the_others() -> None:
    names = [str(i) for i in range(9)]
    fetchers: list[Fetcher] = []
    for _ in range(1 + fan_out.EXTRA_SEEDS):
        (start,) = fan_out.next_starts(names, fetchers)
        assert fan_out.next_starts(names, [*fetchers, made(start.node)]) == []
        fetchers.append(made(start.node, reason="DiskFull"))
    assert fan_out.next_starts(names, fetchers) == [], "the source fails, and not the nodes"
    fetchers[0] = made("0", ready=True)
    (start,) = fan_out.next_starts(names, fetchers)
    assert start.peers == (fetchers[0],), "those that fail occupy no peer"


def test_a_node_whose_pod_stops_gets_no_second_one() -> None:
    assert fan_out.next_starts(["1"], [made("1", terminating=True)]) == []


@pytest.mark.parametrize(
    ("fields", "cache", "uses"),
    [
        ({"model": hub()}, {}, True),
        ({"model": hub(revision="main")}, {}, True),
        ({"model": hub(revision="v2")}, {}, False),
        ({"model": hub(revision="v2")}, {"model": {"revision": "v2"}}, True),
        ({"model": hub()}, {"uri": "hf://meta-llama/Other"}, False),
        ({"model": hub(), "cache": {"size": "1Gi"}}, {}, False),
        ({"model": hub(), "runtime": {"env": [{"name": "HF_ENDPOINT", "value": "http://h"}]}}, {}, False),
        (
            {"model": hub(), "runtime": {"env": [{"name": "HF_ENDPOINT", "value": "http://h"}]}},
            {"env": [{"name": "HF_ENDPOINT", "value": "http://h"}]},
            True,
        ),
        (
            {"model": hub(), "runtime": {"env": [{"name": "HF_ENDPOINT", "valueFrom": {}}]}},
            {"env": [{"name": "HF_ENDPOINT", "valueFrom": {}}]},
            False,
        ),
        ({"model": hub(endpoint="http://h/")}, {"env": [{"name": "HF_ENDPOINT", "value": "http://h"}]}, True),
        ({"model": hub(endpoint="http://h")}, {}, False),
        ({"model": {"uri": BUCKET}}, {"uri": BUCKET}, True),
        ({"model": {"uri": BUCKET, "endpoint": "http://m"}}, {"uri": BUCKET}, False),
        (
            {"model": {"uri": BUCKET, "endpoint": "http://m"}},
            {"uri": BUCKET, "model": {"endpoint": "http://m"}},
            True,
        ),
        ({"model": hub()}, SHARED, True),
        ({"model": hub()}, {"storage": {"claim": {"namespace": "other", "size": "1Gi"}}}, False),
        ({"model": hub(), "cache": {"prefetch": True}}, {}, True),
        ({"model": hub()}, {"managed": True}, False),
    ],
)
def test_a_service_uses_a_cache_with_the_same_model(
    fields: dict[str, Any], cache: dict[str, Any], uses: bool
) -> None:
    assert has_model(model_cache(**cache), service(**fields), SETTINGS) == uses


def chosen(index: Index, current: str | None, **fields: Any) -> str:
    """The choice of a service that has made `current`."""
    mounted = None if current is None else MountedCache(current)
    return index.choose(replace(service(model=hub(), **fields), model_cache=mounted)).name


def test_a_choice_that_was_made_stays() -> None:
    index = Index(SETTINGS)
    with pytest.raises(Retryable, match="not listed"):
        chosen(index, None)
    assert chosen(index, "") == "" and chosen(index, "old") == "old"
    index.replace([model_cache("b"), model_cache("a"), model_cache("gone", deleting=True)])
    assert chosen(index, None) == "a"
    assert chosen(index, "b") == "b" and chosen(index, "gone") == "gone", "other pods would be restarted"
    assert chosen(index, "") == "", "a service that runs does not begin to use a cache"
    index.replace([model_cache("a", uri="hf://meta-llama/Other"), model_cache("b")])
    assert chosen(index, "a") == "b", "the model was edited while the operator was down"
    refused = Index(SETTINGS)
    refused.give_up()
    assert chosen(refused, None) == "", "an API server without the kind stops no InferenceService"
    assert chosen(refused, None, cache={"prefetch": True}) == "", "it is never made"


def test_prefetch_uses_what_exists_or_what_will_be_made() -> None:
    index = Index(SETTINGS)
    index.replace([model_cache("a")])
    assert chosen(index, None, cache={"prefetch": True}) == "a" and not index.wanted.is_set()
    index.replace([])
    name = chosen(index, None, cache={"prefetch": True})
    assert name.startswith("prefetch-") and index.wanted.is_set()
    assert chosen(index, name, cache={"prefetch": True}) == name, "also before it exists"


def prefetching(**fields: Any) -> InferenceService:
    """A service whose model is to be prefetched."""
    return service(**{"model": hub(), "cache": {"prefetch": True}, **fields})


def test_services_that_need_the_same_share_what_prefetch_makes() -> None:
    made = prefetch.build(prefetching(), SETTINGS)
    assert made["spec"] == {
        "model": {"uri": URI},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "retentionSeconds": 86_400,
    }
    meta = made["metadata"] | {"uid": "u", "generation": 1, "resourceVersion": "1"}
    cache = spec.parse({**made, "metadata": meta})
    assert cache.managed and has_model(cache, prefetching(), SETTINGS)
    assert has_model(cache, service("other", model=hub()), SETTINGS), "also without cache.prefetch"
    cpu = {"device": "cpu", "env": [{"name": "HF_ENDPOINT", "value": "http://h"}, {"name": "NO_PROXY", "value": "h"}, {"name": "X", "value": "y"}]}  # fmt: skip
    for other in (
        prefetching(model=hub(revision="v2")),
        prefetching(nodeSelector={"pool": "a"}),
        prefetching(tolerations=[{"operator": "Exists"}]),
        prefetching(runtime=cpu),
    ):
        assert prefetch.name(other, SETTINGS) != cache.name and not has_model(cache, other, SETTINGS)
    elsewhere = prefetch.build(prefetching(runtime=cpu), SETTINGS)["spec"]
    assert elsewhere["model"] == {"uri": URI, "endpoint": "http://h"}
    assert elsewhere["env"] == [{"name": "NO_PROXY", "value": "h"}] and "tolerations" not in elsewhere


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({}, Settings(), "--model-caches"),
        ({"model": hub(credentialsSecretRef={"name": "s"})}, SETTINGS, "cannot read Secret s"),
        ({"runtime": {"env": [{"name": "HF_ENDPOINT", "valueFrom": {}}]}}, SETTINGS, "spec.model.endpoint"),
        ({"cache": {"prefetch": True, "size": "1Gi"}}, SETTINGS, "remove claimName, hostPath and size"),
    ],
)
def test_a_prefetch_that_cannot_be_is_refused(
    fields: dict[str, Any], settings: Settings, message: str
) -> None:
    with pytest.raises(InvalidSpec, match=message):
        objects(prefetching(**fields), settings)


def test_pods_mount_the_directory_of_a_shared_claim() -> None:
    cache = model_cache(**SHARED)
    index = Index(SETTINGS)
    index.replace([cache])
    user = service(model=hub(credentialsSecretRef={"name": "s"}))
    user = replace(user, model_cache=index.choose(user))
    assert user.model_cache == MountedCache("llama", "models")
    built = {kind.name: body for (kind, _), body in objects(user, SETTINGS).items()}
    assert "PersistentVolumeClaim" not in built
    deployment = built["Deployment"]
    pod_spec = deployment["spec"]["template"]["spec"]
    source = {"claimName": "models", "readOnly": True}
    assert {"name": "cache", "persistentVolumeClaim": source} in pod_spec["volumes"]
    [fetch] = pod_spec["initContainers"]
    for container in (fetch, *pod_spec["containers"]):
        directory = container["args"].index(contract.FLAG_DOWNLOAD_DIR) + 1
        assert container["args"][directory] == "/cache/skiff-models/llama"
        mounts = [each for each in container["volumeMounts"] if each["name"] == "cache"]
        assert mounts == [{"name": "cache", "mountPath": "/cache", "readOnly": True}]
    assert contract.FLAG_WAIT in fetch["args"]
    assert contract.ENV_HUB_TOKEN not in {each["name"] for each in fetch["env"]}, "nothing is downloaded"
    # By this the operator knows after a restart what is mounted, and that a pod of any revision uses it.
    assert model_cache_claim.mounted_cache(deployment) == user.model_cache
    assert read_rollout(deployment).model_cache == "llama"
    template = deployment["spec"]["template"]
    pod = {"metadata": {**template["metadata"], "name": "p", "uid": "u"}, "spec": pod_spec}
    assert read_pod(pod, gpu_resource="").model_cache == "llama"
    pod["metadata"]["deletionTimestamp"] = NOW
    assert read_pod(pod, gpu_resource="").model_cache == "llama"
    assert read_pod({**pod, "status": {"phase": "Failed"}}, gpu_resource="").model_cache == ""


def test_the_fetcher_of_a_claim_is_restricted_and_touches_its_own_directory() -> None:
    cache = model_cache(**SHARED, nodeSelector={"pool": "a"}, serviceAccountName="reader")
    body = fetcher.build(cache, SETTINGS, node=claim.target_name(cache), peers=[])
    assert body["metadata"]["namespace"] == "default" and claim.target_name(cache) == "default/models"
    pod_spec = body["spec"]
    assert "initContainers" not in pod_spec and pod_spec["securityContext"]["fsGroup"] == 65532
    assert "affinity" not in pod_spec and pod_spec["nodeSelector"] == {"pool": "a"}
    assert pod_spec["serviceAccountName"] == "reader" and not pod_spec["automountServiceAccountToken"]
    assert pod_spec["volumes"][0]["persistentVolumeClaim"] == {"claimName": "models"}
    [container] = pod_spec["containers"]
    assert "/models/skiff-models/llama" in container["args"]
    assert contract.ENV_PEER_TOKEN not in {each["name"] for each in container["env"]}
    [remove] = fetcher.build_removal(cache, SETTINGS, node="default/models")["spec"]["containers"]
    assert remove["command"] == ["sh", "-c", 'rm -rf -- "$0"', "/models/skiff-models/llama"]


def test_a_pod_of_another_namespace_never_becomes_a_peer() -> None:
    """It would get the token of the peers, and could send them any model."""
    cache = model_cache()
    body = fetcher.build(cache, SETTINGS, node="n", peers=[])
    assert fetcher.belongs(body, cache, SETTINGS)
    assert not fetcher.belongs(body, model_cache("other"), SETTINGS)
    body["metadata"]["namespace"] = "default"
    assert not fetcher.belongs(body, cache, SETTINGS)
    assert fetcher.belongs(body, model_cache(**SHARED), SETTINGS)


def test_a_claim_is_made_of_size_and_class() -> None:
    wanted = {"namespace": "team", "size": "1Gi", "storageClassName": "nfs"}
    made = claim.build(model_cache(storage={"claim": wanted}))
    assert (made["metadata"]["namespace"], made["metadata"]["name"]) == ("team", "skiff-model.llama")
    assert made["metadata"]["ownerReferences"][0]["kind"] == "ModelCache"
    assert made["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "1Gi"}},
        "storageClassName": "nfs",
    }


@pytest.mark.parametrize(
    ("log", "reason", "remedy"),
    [
        (
            'message="hub refuses a/b (401): check its name; set HF_TOKEN"',
            "Unauthorized",
            "credentialsSecretRef",
        ),
        (
            'message="a/b has no revision \\"x\\" on hub (404): correct the revision"',
            "ModelNotFound",
            "create another",
        ),
        ('message="not enough space in /models: 9 GB are needed"', "DiskFull", "free the node's disk"),
        (
            'message="cannot use /models (Permission denied); make /models writable for user 65532"',
            "VolumeNotWritable",
            "chownHostPath",
        ),
        ('message="config.json: no answer from hub (timeout)"', "SourceUnreachable", "HTTPS_PROXY"),
        ('message="x: checksum mismatch after 2 downloads"', "ChecksumMismatch", "proxy"),
        (
            'message="s3://b/x: access was refused (403 AccessDenied); set"',
            "AccessDenied",
            "serviceAccountName",
        ),
        ('message="s3://b/x: no credentials were found; set"', "NoCredentials", "serviceAccountName"),
        (
            'message="s3://b/x: there is no bucket b (404 NoSuchBucket); correct"',
            "ModelNotFound",
            "create another",
        ),
        ('message="s3://b/x has no objects: check the bucket"', "ModelNotFound", "create another"),
        (
            'message="s3://b/x: the bucket is in another region (301); set AWS_REGION"',
            "WrongRegion",
            "spec.env",
        ),
        ("message=odd", "FetchFailed", "odd"),
    ],
)
def test_failures_are_classified_with_a_remedy(log: str, reason: str, remedy: str) -> None:
    text = f"2026-01-01T00:00:00Z error fetch fetch_failed model=hf://a/b@main {log}"
    state = {"terminated": {"exitCode": contract.EXIT_FETCH_FAILED, "message": f"first line\n{text}\n"}}
    found = fetcher.read(pod(lastState=state))
    assert found.reason == reason and remedy in found.message


def test_secrets_in_the_log_of_a_fetcher_are_not_shown() -> None:
    line = 'fetch_failed message="cannot reach https://host.example/x?token=s3cret&X-Amz-Signature=abcdef0123456789abcdef"'
    state = {"terminated": {"exitCode": contract.EXIT_FETCH_FAILED, "message": f"first line\n{line}\n"}}
    message = fetcher.read(pod(lastState=state)).message
    assert "cannot reach" in message and "s3cret" not in message and "abcdef" not in message


@pytest.mark.parametrize("text", ["x", "-1", "", "\u0661", "9" * 30])
def test_generation_that_somebody_else_wrote_is_that_of_no_spec(text: str) -> None:
    found = pod()
    found["metadata"]["annotations"][ANNOTATION_GENERATION] = text
    assert fetcher.read(found).generation == 0


def test_a_cache_expires_only_at_the_version_whose_retention_is_over() -> None:
    """Its owner may have changed the retention since it was listed."""
    sent: list[tuple[str, dict[str, Any]]] = []

    class Api:
        delete = Client.delete

        async def request(self, method: str, _path: str, body: dict[str, Any]) -> None:
            sent.append((method, body))

    controller = ModelCacheController(
        cast(Client, Api()), Index(Settings()), Cache(), Settings(), synced=lambda: True
    )
    cache = model_cache(retentionSeconds=60)
    unused = Status(1, 0, 0, 0, (), unused_since="2026-01-01T00:00:00Z")
    assert asyncio.run(controller._expire(cache, unused))
    preconditions = {"uid": cache.uid, "resourceVersion": cache.resource_version}
    assert [(method, body["preconditions"]) for method, body in sent] == [("DELETE", preconditions)]


def pod(**container: Any) -> dict[str, Any]:
    """A live fetcher."""
    body = fetcher.build(model_cache(), Settings(), node="n", peers=[])
    body["metadata"]["uid"] = "u"
    status = {
        "name": "fetch",
        "image": "i",
        "state": {"waiting": {"reason": "CrashLoopBackOff"}},
        **container,
    }
    return {**body, "status": {"phase": "Running", "podIP": "fd00::1", "containerStatuses": [status]}}


def test_obstacles_before_the_download_are_named() -> None:
    blocked = pod()
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no memory"}
    blocked["status"]["conditions"] = [condition]
    assert fetcher.read(blocked).reason == "Unschedulable"
    secret = pod(state={"waiting": {"reason": "CreateContainerConfigError", "message": "secret x not found"}})
    found = fetcher.read(secret)
    assert found.reason == "ContainerConfigError" and "secret x not found" in found.message
    killed = pod(lastState={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
    assert fetcher.read(killed).reason == "OutOfMemory"
    assert found.url == f"http://[fd00::1]:{contract.PEER_PORT}"


def test_the_token_of_the_source_and_of_peers_come_from_secrets() -> None:
    cache = model_cache(model={"credentialsSecretRef": {"name": "hub", "key": "k"}})
    body = fetcher.build(cache, Settings(), node="n", peers=["http://10.0.0.1:8010"])
    (container,) = body["spec"]["containers"]
    environ = {each["name"]: each for each in container["env"]}
    bucket = {"endpoint": "http://m:9000", "credentialsSecretRef": {"name": "keys"}}
    store = fetcher.build(model_cache(uri=BUCKET, model=bucket), Settings(), node="n", peers=[])
    keys = {each["name"]: each for each in store["spec"]["containers"][0]["env"]}
    assert keys[contract.ENV_S3_ENDPOINT]["value"] == "http://m:9000"
    for name in (contract.ENV_S3_KEY_ID, contract.ENV_S3_SECRET_KEY):
        assert keys[name]["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": name}
    assert environ[contract.ENV_HUB_TOKEN]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "k"}
    secret = fetcher.build_secret(cache, Settings())
    key = environ[contract.ENV_PEER_TOKEN]["valueFrom"]["secretKeyRef"]
    assert key == {"name": secret["metadata"]["name"], "key": "token"}
    assert len(secret["stringData"]["token"]) > 40
    assert secret["stringData"] != fetcher.build_secret(cache, Settings())["stringData"]
    assert container["args"][-2:] == [contract.FLAG_PEER, "http://10.0.0.1:8010"]
    (prepare,) = body["spec"]["initContainers"]
    assert prepare["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
    plain = fetcher.build(cache, Settings(model_cache_chown=False), node="n", peers=[])
    assert "initContainers" not in plain["spec"]


def facts(**fields: Any) -> Facts:
    """Facts of three nodes: one has the model, one reads it, one waits."""
    fetchers = (made("1", ready=True, running=True), made("2", running=True))
    progress = {"f-1": Progress("complete", 90, 90, "c" * 40), "f-2": Progress("fetching", 30, 90)}
    base = {"nodes": ("1", "2", "3"), "fetchers": fetchers, "progress": progress, "users": 0, "in_use": False}
    return Facts(**{**base, **fields})


def test_the_status_has_progress_size_and_the_time_of_last_use() -> None:
    cache = model_cache()
    first = report.report(cache, facts(), None, NOW)
    assert (first.nodes, first.ready_nodes, first.size_bytes, first.commit) == (3, 1, 90, "c" * 40)
    states = [(each.node, each.state, each.percent) for each in first.incomplete]
    assert states == [("2", "Fetching", 33), ("3", "Waiting", 0)]
    assert (first.conditions[0].status, first.conditions[0].reason) == ("False", "Fetching")
    moved = facts(progress={"f-2": Progress("fetching", 60, 90)})
    second = report.report(cache, moved, first, LATER)
    assert second.size_bytes == 90 and second.conditions == first.conditions
    assert second != first and second.without_progress() == first.without_progress()
    assert first.unused_since == second.unused_since == NOW
    used = report.report(cache, facts(in_use=True, users=1), second, LATER)
    assert used.unused_since == "" and used.users == 1
    assert report.report(cache, facts(), used, LATER).unused_since == LATER
    failed = report.report(
        cache, facts(fetchers=(made("1", reason="DiskFull", message="full"),)), first, LATER
    )
    assert failed.conditions[0].reason == "DiskFull" and "node 1: full" in failed.conditions[0].message
    assert report.report(cache, facts(nodes=(), fetchers=()), None, NOW).conditions[0].reason == "NoNodes"
    ready = report.report(cache, facts(nodes=("1",)), first, LATER).conditions[0]
    assert (ready.status, ready.last_transition_time) == ("True", LATER)
    shared = model_cache(**SHARED)
    missing = report.report(shared, facts(nodes=(), fetchers=()), None, NOW).conditions[0]
    assert missing.reason == "NoClaim" and "namespace default has no claim models" in missing.message
    deleting = model_cache(deleting=True)
    assert report.report(deleting, facts(in_use=True), first, LATER).conditions[0].reason == "InUse"


@pytest.mark.parametrize(
    ("tolerations", "is_open"),
    [
        ([], False),
        ([{"operator": "Exists"}], True),
        ([{"key": "gpu", "operator": "Exists"}], True),
        ([{"key": "gpu", "value": "h100"}], True),
        ([{"key": "gpu", "value": "a100"}], False),
        ([{"key": "gpu", "operator": "Exists", "effect": "NoExecute"}], False),
        ([{"key": "other", "operator": "Exists"}], False),
    ],
)
def test_a_tainted_node_needs_a_toleration(tolerations: list[dict[str, Any]], is_open: bool) -> None:
    node: dict[str, Any] = {
        "metadata": {"name": "n"},
        "spec": {"taints": [{"key": "gpu", "value": "h100", "effect": "NoSchedule"}]},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]},
    }
    assert nodes.read(node, tolerations).open == is_open
    node["spec"]["unschedulable"] = True
    assert not nodes.read(node, tolerations).open
