"""Before a scale-in each pod gets the cost of deleting it, so that the coldest goes; real pods' addresses are loopback's."""

from contextlib import ExitStack
from typing import Any

import pytest
from apiserver import ApiServer
from metrics_pages import MetricsPage, served
from operator_checks import place
from operator_process import eventually
from play_kubelet import PlayKubelet

from skiff_operator import deletion_cost
from skiff_operator.deletion_cost import ANNOTATION

PAGE = """# TYPE skiff_requests_in_flight gauge
skiff_requests_in_flight {requests}
skiff_kv_cache_pages{{state="free"}} {free}
skiff_kv_cache_pages{{state="used"}} {used}
"""


def page(requests: float = 0, free: float = 100, used: float = 0) -> str:
    """The part of a pod's metrics that counts."""
    return PAGE.format(requests=requests, free=free, used=used)


@pytest.mark.parametrize(
    ("text", "cost"),
    [
        (page(), 0),
        (page(free=50, used=50), 500),
        (page(free=99_999, used=1), 1),
        (page(requests=1), 1000),
        (page(requests=3, free=0, used=100), 3999),
        (page(requests=1e12), 1_000_000_000),
        (page(free=0), 0),
        ("", None),
        ("skiff_requests_in_flight nothing\n", None),
        ("skiff_requests_in_flight NaN\n", None),
        ("<html>not a page of metrics</html>", None),
    ],
)
def test_requests_cost_more_than_any_cache(text: str, cost: int | None) -> None:
    assert deletion_cost.from_metrics(text) == cost


def scale(api: ApiServer, replicas: int) -> None:
    """Set the number of replicas as `kubectl scale` does."""
    api.merge("inferenceservices", "llama", {"spec": {"replicas": replicas}}, "scale")


@pytest.mark.usefixtures("operator")
def test_the_coldest_pods_go(api: ApiServer) -> None:
    """Of five: the one that loads first, then the idle ones; the one whose load is unknown counts as idle."""
    spec = {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}, "replicas": 5}
    body = {"apiVersion": "serving.skiff.dev/v1alpha1", "kind": "InferenceService", "spec": spec}
    api.create("inferenceservices", {**body, "metadata": {"name": "llama"}})
    kubelet = PlayKubelet(api, "llama")
    eventually(lambda: len(kubelet.pods()) == 5, "five pods")
    names = [pod["metadata"]["name"] for pod in kubelet.pods()]
    busy, warm, idle, silent, loading = names
    pages = {busy: page(requests=2), warm: page(free=20, used=80), idle: page()}
    with ExitStack() as stack:
        for number, pod in enumerate(kubelet.pods(), start=2):
            name, address = pod["metadata"]["name"], f"127.1.7.{number}"
            kubelet.report(
                pod, ready=name != loading, state={"running": {"startedAt": "2026-01-01T00:00:00Z"}}
            )
            place(api, name, address)
            if name in pages:
                stack.enter_context(served(address, MetricsPage(pages[name])))
        eventually(
            lambda: api.get("inferenceservices", "llama")["status"]["readyReplicas"] == 4, "four are ready"
        )
        assert not any(ANNOTATION in _annotations(pod) for pod in kubelet.pods()), "not before a scale-in"
        scale(api, 4)
        eventually(lambda: loading not in _names(kubelet), "the loading pod goes")
        costs = {pod["metadata"]["name"]: _annotations(pod).get(ANNOTATION) for pod in kubelet.pods()}
        assert costs == {busy: "2000", warm: "800", idle: "0", silent: None}
        scale(api, 2)
        eventually(lambda: sorted(_names(kubelet)) == sorted([busy, warm]), "the cold pods go")
        scale(api, 1)
        eventually(lambda: _names(kubelet) == [busy], "the pod without requests goes")


def _names(kubelet: PlayKubelet) -> list[str]:
    return [pod["metadata"]["name"] for pod in kubelet.pods()]


def _annotations(pod: Any) -> dict[str, str]:
    found: dict[str, str] = pod["metadata"].get("annotations", {})
    return found
