"""Steps and checks of tests that run an operator against a real API server and its garbage collector."""

from functools import partial
from typing import Any

import httpx
from apiserver import ApiServer, Refused
from operator_process import OperatorProcess, eventually
from play_kubelet import NOT_FOUND, REVISION

CHILDREN = ("serviceaccounts", "deployments", "services")


def create(api: ApiServer, *names: str) -> None:
    """Create demo services, and wait for their children and statuses."""
    for name in names:
        body = {
            "apiVersion": "serving.skiff.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}},
        }
        api.create("inferenceservices", body)
    for name in names:
        eventually(partial(_complete, api, name), f"{name} has its children and a status")


def _complete(api: ApiServer, name: str) -> bool:
    return all(api.find(each, name) for each in CHILDREN) and "status" in api.get("inferenceservices", name)


def delete(api: ApiServer, name: str) -> None:
    """Delete a service, and wait until the garbage collector has removed all of it."""
    api.delete("inferenceservices", name)
    eventually(lambda: not left(api, name), f"nothing is left of {name}")


def left(api: ApiServer, name: str) -> list[str]:
    """Return the objects under a service's name."""
    return [plural for plural in ("inferenceservices", *CHILDREN) if api.find(plural, name)]


def find_if_served(api: ApiServer, plural: str, name: str = "llama") -> Any:
    """Return an object, or None, also where its kind is not served."""
    try:
        return api.find(plural, name)
    except Refused as error:
        assert error.status == NOT_FOUND
        return None


def condition(api: ApiServer, kind: str, name: str = "llama") -> tuple[str, str]:
    """Return status and reason of a condition that was observed for the present generation; empty before that."""
    found = api.get("inferenceservices", name)
    status = found.get("status", {})
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        return "", ""
    return next((each["status"], each["reason"]) for each in status["conditions"] if each["type"] == kind)


def revision(api: ApiServer, name: str = "llama") -> str:
    """Return the revision of a Deployment's template."""
    label: str = api.get("deployments", name)["spec"]["template"]["metadata"]["labels"][REVISION]
    return label


def place(api: ApiServer, pod: str, address: str) -> None:
    """Give a pod an address, as its node's network does."""
    addresses = {"podIP": address, "podIPs": [{"ip": address}]}
    api.merge("pods", pod, {"status": addresses}, "status")


def known(operator: OperatorProcess) -> int:
    """Return the number of InferenceServices that the operator knows."""
    values = operator.metrics()
    return int(
        sum(
            values[f"skiff_operator_objects{{condition=Ready,status={each}}}"]
            for each in ("True", "False", "Unknown")
        )
    )


def resynced(operator: OperatorProcess, times: int = 2) -> None:
    """Wait until the operator has looked at everything again."""
    seen: set[float] = set()

    def enough() -> bool:
        seen.add(operator.metrics()["skiff_operator_last_resync_timestamp_seconds"])
        return len(seen) > times

    eventually(enough, "resyncs")


def settle(operator: OperatorProcess) -> None:
    """Wait until a resync writes nothing: the status of a Deployment changes for a while after it is made."""

    def is_settled() -> bool:
        before = operator.writes()
        resynced(operator)
        return operator.writes() == before

    eventually(is_settled, "a resync without writes")


def assert_no_ghost(api: ApiServer, operator: OperatorProcess, name: str) -> None:
    """Nothing comes back under a deleted service's name, and the operator writes nothing."""
    eventually(lambda: not left(api, name), f"nothing is left of {name}")
    resynced(operator)
    writes = operator.writes()
    resynced(operator)
    assert operator.writes() == writes
    assert left(api, name) == []


def assert_served(api: ApiServer, operator: OperatorProcess, name: str) -> None:
    """A service is not forgotten: a deleted child of it is made again."""
    before = api.get("services", name)["metadata"]["uid"]
    api.delete("services", name)
    made = eventually(lambda: api.find("services", name), f"Service {name} is made again")
    assert made["metadata"]["uid"] != before
    resynced(operator)


def probe(operator: OperatorProcess, path: str) -> tuple[int, str]:
    """Status and text of a probe."""
    reply = httpx.get(f"http://127.0.0.1:{operator.health_port}{path}", trust_env=False)
    return reply.status_code, reply.text
