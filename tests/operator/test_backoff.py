"""Retries of refused writes come ever less often, whatever the resync does, and at once after an edit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apiserver import ApiServer
from operator_process import OperatorProcess, eventually

REFUSED = "skiff_operator_reconciles_total{result=refused}"
RESYNC = "skiff_operator_last_resync_timestamp_seconds"
BLOCKER = {
    "metadata": {"name": "llama"},
    "spec": {"selector": {"app": "x"}, "ports": [{"port": 80, "name": "x"}]},
}


@pytest.fixture
def operator(api: ApiServer, operator_kubeconfig: Path, tmp_path: Path) -> Iterator[OperatorProcess]:
    """An operator for the test's namespace alone that resyncs all the time."""
    own = ["--namespaces", api.namespace, "--no-leader-elect"]
    quick = ["--resync-seconds", "0.1", "--status-delay-seconds", "0.05"]
    with OperatorProcess(operator_kubeconfig, tmp_path / "log", *own, *quick) as process:
        yield process


def edit(api: ApiServer, **fields: Any) -> None:
    """Merge into the spec."""
    api.merge("inferenceservices", "llama", {"spec": fields})


def test_a_refused_object_is_tried_ever_less_often(api: ApiServer, operator: OperatorProcess) -> None:
    api.create("services", BLOCKER)
    body = {"apiVersion": "serving.skiff.dev/v1alpha1", "kind": "InferenceService"}
    spec = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}}
    api.create("inferenceservices", {**body, "metadata": {"name": "llama"}, "spec": spec})
    eventually(lambda: operator.metrics()[REFUSED] >= 3, "it is tried again")
    first = operator.metrics()
    eventually(lambda: operator.metrics()[RESYNC] > first[RESYNC] + 4, "dozens of resyncs")
    tries = operator.metrics()[REFUSED]
    assert tries <= first[REFUSED] + 3, "a resync is no reason to try again"
    edit(api, drain={"timeoutSeconds": 61})
    eventually(lambda: operator.metrics()[REFUSED] > tries, "an edit is tried at once", 15)
    eventually(lambda: operator.metrics()[REFUSED] > tries + 2, "and backs off from a second again", 20)
    api.delete("services", "llama")
    edit(api, drain={"timeoutSeconds": 62})
    eventually(lambda: _is_owned(api), "what was refused is made")


def _is_owned(api: ApiServer) -> bool:
    found = api.find("services", "llama")
    return found is not None and "ownerReferences" in found["metadata"]
