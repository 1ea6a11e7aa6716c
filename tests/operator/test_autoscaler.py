"""Autoscaling by a running operator: from zero by the subresource, up and down by the pods' own metrics, and to zero."""

from contextlib import ExitStack
from typing import Any

import pytest
from apiserver import ApiServer
from metrics_pages import MetricsPage, served
from operator_checks import place
from operator_process import OperatorProcess, eventually
from play_kubelet import PlayKubelet

PAGE = 'skiff_requests_running {running}\nskiff_requests_queued 0\nskiff_requests_total{{outcome="finished"}} 7\n'
Start = Any


def service(**autoscaling: Any) -> dict[str, Any]:
    """An autoscaled InferenceService without pods, which are removed soon."""
    policy = {"minReplicas": 0, "maxReplicas": 3, "targets": {"concurrency": 4}, "scaleDownDelaySeconds": 1}
    spec = {
        "model": {"uri": "demo://"},
        "runtime": {"device": "cpu"},
        "replicas": 0,
        "autoscaling": {**policy, "scaleToZeroAfterSeconds": 3, **autoscaling},
    }
    body = {"apiVersion": "serving.skiff.dev/v1alpha1", "kind": "InferenceService", "spec": spec}
    return {**body, "metadata": {"name": "llama"}}


class Pods:
    """Plays the kubelet, with an address of the loopback network and a page of metrics for each pod."""

    def __init__(self, api: ApiServer, subnet: int, stack: ExitStack) -> None:
        self._api, self._subnet, self._stack = api, subnet, stack
        self.kubelet = PlayKubelet(api, "llama")
        self.page = MetricsPage(PAGE.format(running=0))
        self._addresses: dict[str, str] = {}

    def serve(self, count: int) -> None:
        """Wait for exactly `count` pods, and make all of them ready."""
        eventually(lambda: len(self.kubelet.pods()) == count, f"{count} pods")
        for pod in self.kubelet.pods():
            name = pod["metadata"]["name"]
            if name not in self._addresses:
                address = self._addresses[name] = f"127.1.{self._subnet}.{len(self._addresses) + 2}"
                self._stack.enter_context(served(address, self.page))
                self.kubelet.report(pod, ready=True, state={"running": {"startedAt": "2026-01-01T00:00:00Z"}})
                place(self._api, name, address)


def replicas(api: ApiServer) -> int:
    """The number of pods that shall be."""
    found: int = api.get("inferenceservices", "llama")["spec"]["replicas"]
    return found


def scaling(api: ApiServer) -> Any:
    """The last change of the number, from the status."""
    return api.get("inferenceservices", "llama").get("status", {}).get("autoscaling", {})


def test_from_zero_by_load_and_back_to_zero(api: ApiServer, operator: OperatorProcess) -> None:
    before = operator.metrics()
    api.create("inferenceservices", service())
    eventually(lambda: api.find("deployments", "llama"), "a Deployment")
    assert api.get("deployments", "llama")["spec"]["replicas"] == 0
    with ExitStack() as stack:
        pods = Pods(api, 8, stack)
        api.merge("inferenceservices", "llama", {"spec": {"replicas": 1}}, "scale")
        pods.page.text = PAGE.format(running=10)
        pods.serve(1)
        eventually(lambda: replicas(api) == 3, "ten requests, four for each pod")
        found = eventually(
            lambda: (each := scaling(api)).get("desiredReplicas") == 3 and each, "the status shows it"
        )
        assert found["message"] == "10 requests, 4 for each pod"
        pods.page.text = PAGE.format(running=0)
        eventually(lambda: len(pods.kubelet.pods()) == 3, "three pods")
        assert replicas(api) == 3, "two of them load"
        pods.serve(3)
        eventually(lambda: replicas(api) == 0, "no request for 3 s")
        pods.kubelet.remove_deleted()
        eventually(lambda: not pods.kubelet.pods(), "no pods")
    status = eventually(
        lambda: (each := scaling(api)).get("desiredReplicas") == 0 and each, "the status shows it"
    )
    assert status["message"] == "no request for 3 s"
    assert api.get("inferenceservices", "llama", "scale")["status"]["replicas"] == 0
    notes = [(each["reason"], each["note"]) for each in api.list("events")]
    assert ("ScaledUp", "from 1 to 3 pods: 10 requests, 4 for each pod") in notes
    api.merge("inferenceservices", "llama", {"spec": {"replicas": 1}}, "scale")
    note = "from 0 to 1 pods: by the subresource scale or an edit"
    eventually(lambda: note in [each["note"] for each in api.list("events")], "another's change is announced")
    after = operator.metrics()
    for series in (
        "skiff_operator_scalings_total{direction=up}",
        "skiff_operator_scalings_total{direction=down}",
    ):
        assert after[series] > before[series]
    assert after["skiff_operator_load_readings_total{result=answered}"] > 0


@pytest.mark.usefixtures("operator")
def test_the_limits_hold_without_any_pod_that_answers(api: ApiServer) -> None:
    api.create("inferenceservices", service(minReplicas=2, scaleToZeroAfterSeconds=None))
    eventually(lambda: replicas(api) == 2, "minReplicas")
    with ExitStack() as stack:
        pods = Pods(api, 9, stack)
        pods.page.text = "<html>not a page of metrics</html>"
        pods.serve(2)
        api.merge("inferenceservices", "llama", {"spec": {"replicas": 5}}, "scale")
        eventually(lambda: replicas(api) == 3, "maxReplicas")
        pods.serve(3)
        eventually(
            lambda: api.get("inferenceservices", "llama")["status"]["readyReplicas"] == 3, "three are ready"
        )
        read = pods.page.reads
        eventually(lambda: pods.page.reads > read + 6, "they are read")
        assert replicas(api) == 3, "nothing is known of their load"


def test_a_wish_without_an_operator_is_kept_until_one_runs(api: ApiServer, start: Start) -> None:
    lease = ("--lease-duration-seconds", "4", "--lease-renew-seconds", "1")
    first = start("first", *lease)
    first.start()
    api.create("inferenceservices", service())
    eventually(lambda: api.find("deployments", "llama"), "a Deployment")
    first.kill()
    api.merge("inferenceservices", "llama", {"spec": {"replicas": 2}}, "scale")
    second = start("second", *lease)
    second.start()
    eventually(lambda: len(PlayKubelet(api, "llama").pods()) == 2, "two pods")
    assert replicas(api) == 2
