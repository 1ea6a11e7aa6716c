"""The pure parts of ModelCaches: the fan-out over nodes, the choice by a service, failures with remedies, and the status."""

from typing import Any

import pytest
from services import hub, service

from skiff_operator.errors import Retryable
from skiff_operator.model_caches import fan_out, fetcher, nodes, report, spec
from skiff_operator.model_caches.fetcher import FETCH, Fetcher
from skiff_operator.model_caches.index import Index, has_model
from skiff_operator.model_caches.report import Facts, Progress
from skiff_operator.model_caches.spec import ModelCache
from skiff_operator.settings import Settings
from skiff_runtime import contract

URI = hub()["uri"]
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:10:00Z"


def model_cache(name: str = "llama", *, deleting: bool = False, uri: str = URI, **fields: Any) -> ModelCache:
    """A parsed ModelCache."""
    model = {"uri": uri, **fields.pop("model", {})}
    meta = {"name": name, "uid": f"uid-{name}", "generation": 1, "resourceVersion": "1"}
    if deleting:
        meta["deletionTimestamp"] = NOW
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
    ],
)
def test_a_service_uses_a_cache_with_the_same_model(
    fields: dict[str, Any], cache: dict[str, Any], uses: bool
) -> None:
    assert has_model(model_cache(**cache), service(**fields)) == uses


def chosen(index: Index, current: str | None) -> str:
    """The choice of a service that has made `current`."""
    from msgspec.structs import replace

    return index.choose(replace(service(model=hub()), model_cache=current))


def test_a_choice_that_was_made_stays() -> None:
    index = Index()
    with pytest.raises(Retryable, match="not listed"):
        chosen(index, None)
    assert chosen(index, "") == "" and chosen(index, "old") == "old"
    index.replace([model_cache("b"), model_cache("a"), model_cache("gone", deleting=True)])
    assert chosen(index, None) == "a"
    assert chosen(index, "b") == "b" and chosen(index, "gone") == "gone", "other pods would be restarted"
    assert chosen(index, "") == "", "a service that runs does not begin to use a cache"
    index.replace([model_cache("a", uri="hf://meta-llama/Other"), model_cache("b")])
    assert chosen(index, "a") == "b", "the model was edited while the operator was down"
    refused = Index()
    refused.give_up()
    assert chosen(refused, None) == "", "an API server without the kind stops no InferenceService"


@pytest.mark.parametrize(
    ("log", "reason", "remedy"),
    [
        (
            'message="hub refuses a/b (401): check its name; set HF_TOKEN"',
            "AccessDenied",
            "credentialsSecretRef",
        ),
        (
            'message="a/b has no revision \\"x\\" on hub (404): correct the revision"',
            "ModelNotFound",
            "create another",
        ),
        ('message="not enough space in /models: 9 GB are needed"', "DiskFull", "free the node's disk"),
        (
            'message="cannot use /models (Permission denied); make /models writable"',
            "NotWritable",
            "chownHostPath",
        ),
        ('message="config.json: no answer from hub (timeout)"', "SourceUnreachable", "HTTPS_PROXY"),
        ('message="x: checksum mismatch after 2 downloads"', "ChecksumMismatch", "proxy"),
        ("message=odd", "FetchFailed", "odd"),
    ],
)
def test_failures_are_classified_with_a_remedy(log: str, reason: str, remedy: str) -> None:
    text = f"2026-01-01T00:00:00Z error fetch fetch_failed model=hf://a/b@main {log}"
    state = {"terminated": {"exitCode": contract.EXIT_FETCH_FAILED, "message": f"first line\n{text}\n"}}
    found = fetcher.read(pod(lastState=state))
    assert found.reason == reason and remedy in found.message


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
