"""Recovery of the operator: restart, kill, and a change of leaders."""

from collections.abc import Callable
from typing import Any

from apiserver import ApiServer
from operator_process import OperatorProcess, eventually

CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/inferenceservices.serving.skiff.dev"
LEASE = "skiff-operator"
PLURALS = ("serviceaccounts", "deployments", "services")
Start = Callable[..., OperatorProcess]


def create(api: ApiServer, name: str) -> None:
    """Create the demo service."""
    body = {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
    }
    spec = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}}
    api.create("inferenceservices", {**body, "spec": spec})


def complete(api: ApiServer, names: list[str]) -> bool:
    """Return whether each service has all its children and a status."""
    for plural in PLURALS:
        if not set(names) <= {each["metadata"]["name"] for each in api.list(plural)}:
            return False
    return all("status" in each for each in api.list("inferenceservices"))


def versions(api: ApiServer) -> dict[str, str]:
    """Resource versions of everything that an operator writes."""
    return {
        f"{plural}/{each['metadata']['name']}": each["metadata"]["resourceVersion"]
        for plural in (*PLURALS, "inferenceservices")
        for each in api.list(plural)
    }


def quiet(api: ApiServer, operator: OperatorProcess) -> dict[str, str]:
    """Wait until nothing is queued and nothing has changed for a while; the versions then."""
    seen: list[dict[str, str]] = []

    def unchanged() -> bool:
        seen.append(versions(api))
        idle = operator.metrics()["skiff_operator_queue_depth"] == 0
        return idle and len(seen) > 3 and seen[-1] == seen[-4]

    eventually(unchanged, "nothing changes any more", every_seconds=0.4)
    return seen[-1]


def test_a_restart_writes_nothing(api: ApiServer, start: Start) -> None:
    names = [f"s{number}" for number in range(8)]
    operator = start("a", "--resync-seconds", "1")
    operator.start()
    for name in names:
        create(api, name)
    eventually(lambda: complete(api, names), "all is made")
    before = quiet(api, operator)
    assert operator.stop() == 0
    operator.start()
    first = operator.metrics()["skiff_operator_last_resync_timestamp_seconds"]
    eventually(
        lambda: operator.metrics()["skiff_operator_last_resync_timestamp_seconds"] > first + 1, "a resync"
    )
    assert operator.writes() == 0
    assert versions(api) == before


def test_killed_in_the_middle_it_resumes(api: ApiServer, start: Start) -> None:
    names = [f"s{number:03d}" for number in range(50)]
    operator = start("a", "--workers", "1")
    operator.start()
    for name in names:
        create(api, name)
    eventually(lambda: len(api.list("deployments")) >= 3, "it has begun", every_seconds=0.01)
    operator.kill()
    assert not complete(api, names), "killed too late to prove anything"
    operator.start()
    eventually(lambda: complete(api, names), "all is made")


def test_what_happened_meanwhile_is_made_good(api: ApiServer, start: Start) -> None:
    operator = start("a")
    operator.start()
    for name in ("edited", "drifted", "pruned", "deleted"):
        create(api, name)
    api.merge("inferenceservices", "pruned", {"spec": {"replicas": 2}})
    eventually(lambda: complete(api, ["edited", "drifted", "deleted"]), "all is made")
    eventually(lambda: api.find("poddisruptionbudgets", "pruned"), "a budget")
    quiet(api, operator)
    operator.kill()
    api.merge("inferenceservices", "edited", {"spec": {"drain": {"timeoutSeconds": 7}}})
    api.merge("inferenceservices", "pruned", {"spec": {"replicas": 1}})
    api.merge("deployments", "drifted", {"spec": {"minReadySeconds": 77}})
    api.delete("services", "deleted")
    operator.start()
    eventually(lambda: "7" in _arguments(api, "edited"), "the edit is applied")
    eventually(lambda: api.get("deployments", "drifted")["spec"]["minReadySeconds"] == 2, "drift is repaired")
    eventually(lambda: api.find("services", "deleted"), "what is missing is made")
    eventually(lambda: api.find("poddisruptionbudgets", "pruned") is None, "what is not wanted is pruned")


def _arguments(api: ApiServer, name: str) -> list[str]:
    arguments: list[str] = api.get("deployments", name)["spec"]["template"]["spec"]["containers"][0]["args"]
    return arguments


LONG_LEASE = ("--lease-duration-seconds", "300", "--lease-renew-seconds", "1")
"""A leader that stalls keeps it; where it is to run out, the test shortens it."""


def test_one_leads_and_the_next_takes_over(api: ApiServer, start: Start) -> None:
    first, second = start("first", *LONG_LEASE), start("second", *LONG_LEASE)
    first.start()
    second.start(wait=False)
    eventually(lambda: "waiting for the lease" in second.log.read_text(), "the second waits")
    assert second.healthy()
    create(api, "one")
    eventually(lambda: complete(api, ["one"]), "the first works")
    assert second.metrics()["skiff_operator_leader"] == 0
    first.kill()
    assert _lease(api)["holderIdentity"] == "first"
    _change_lease(api, leaseDurationSeconds=1)
    eventually(second.leads, "the second leads when the Lease has run out")
    create(api, "two")
    eventually(lambda: complete(api, ["one", "two"]), "the second works")
    assert second.stop() == 0
    assert _lease(api)["holderIdentity"] == "", "a leader that stops gives the Lease back"


def test_who_loses_the_lease_ends(api: ApiServer, start: Start) -> None:
    operator = start("loser", *LONG_LEASE)
    operator.start()
    _change_lease(api, holderIdentity="someone-else")
    assert operator.wait() == 1
    assert "someone-else" in operator.log.read_text().splitlines()[-1], "it says who leads"
    assert _lease(api)["holderIdentity"] == "someone-else"


def _change_lease(api: ApiServer, **spec: object) -> None:
    api.merge("leases", LEASE, {"spec": spec})


def _lease(api: ApiServer) -> Any:
    return api.get("leases", LEASE)["spec"]


def test_without_the_crd_it_says_what_to_do(api: ApiServer, start: Start, server: ApiServer) -> None:
    body = server.request("GET", CRD)
    server.request("DELETE", CRD)
    try:
        eventually(lambda: "deletionTimestamp" in _found(server) or not _found(server), "the CRD goes")
        eventually(lambda: not _found(server), "the CRD is gone")
        operator = start("early")
        operator.start(wait=False)
        assert operator.wait() == 1
        assert "apply manifests/crds first" in operator.log.read_text()
    finally:
        body["metadata"] = {"name": body["metadata"]["name"], "labels": body["metadata"]["labels"]}
        body.pop("status")
        server.request("POST", CRD.rpartition("/")[0], body)
        eventually(lambda: _established(server), "the CRD is served again")


def _found(server: ApiServer) -> dict[str, Any]:
    name = CRD.rpartition("/")[2]
    items = server.request("GET", CRD.rpartition("/")[0])["items"]
    return next((each["metadata"] for each in items if each["metadata"]["name"] == name), {})


def _established(server: ApiServer) -> bool:
    conditions = server.request("GET", CRD).get("status", {}).get("conditions") or []
    return any(each["type"] == "Established" and each["status"] == "True" for each in conditions)
