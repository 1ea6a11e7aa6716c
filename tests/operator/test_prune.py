"""Pruning of what pods need: a cache is deleted when its last user is gone, and not before."""

import time
from typing import Any

import pytest
from apiserver import ApiServer
from operator_process import eventually
from play_kubelet import PlayKubelet
from services import hub
from strangers import condition, inference_service

pytestmark = pytest.mark.usefixtures("operator")
CLAIM = "persistentvolumeclaims"
SIZE: dict[str, Any] = {"model": hub(), "cache": {"size": "1Gi", "claimName": None}}
CHANGES: dict[str, dict[str, Any]] = {
    "another claim": {"cache": {"size": None, "claimName": "models"}},
    "no cache": {"cache": None},
    "another source": {"model": {"uri": "pvc://models/llama"}, "cache": None},
}


class Story:
    """A service with a cache of its own, all of whose pods answer."""

    def __init__(self, api: ApiServer) -> None:
        self.api, self.kubelet = api, PlayKubelet(api, "llama")
        spec = {"model": hub(), "runtime": {"device": "cpu"}, "cache": {"size": "1Gi"}}
        api.create("inferenceservices", inference_service("llama", **spec))
        self.kubelet.serve(1)
        self.old = self.wait_ready()
        self.uid = api.get(CLAIM, "llama-cache")["metadata"]["uid"]
        [pod] = self.kubelet.pods()
        # A pod that was never bound to a node does not take its time to stop.
        target = {
            "target": {"kind": "Node", "name": "nowhere"},
            "metadata": {"name": pod["metadata"]["name"]},
        }
        api.request("POST", api.path("pods", pod["metadata"]["name"], "binding"), target)

    def edit(self, **fields: Any) -> None:
        """Merge into the spec."""
        self.api.merge("inferenceservices", "llama", {"spec": fields})

    def wait_ready(self) -> str:
        """Wait until all pods are of the revision that the spec asks for, and answer; that revision."""
        eventually(lambda: condition(self.api, "llama", "Ready")[:2] == ("True", "Serving"), "Ready")
        revision: str = self.api.get("inferenceservices", "llama")["status"]["updateRevision"]
        return revision

    def kept(self) -> bool:
        """Return True while the claim is the one that was made, and is not being deleted."""
        meta = self.api.get(CLAIM, "llama-cache")["metadata"]
        return meta["uid"] == self.uid and "deletionTimestamp" not in meta


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_cache_outlives_its_last_pod(api: ApiServer, change: dict[str, Any]) -> None:
    story = Story(api)
    story.edit(**change)
    eventually(lambda: len(story.kubelet.pods()) == 2, "a pod of the new revision")
    eventually(lambda: condition(api, "llama", "Progressing")[0] == "True", "a rollout")
    time.sleep(1.0)
    assert story.kept(), "the new revision does not work yet"
    story.kubelet.serve(2)
    assert story.wait_ready() != story.old
    time.sleep(1.0)
    assert story.kept(), "the old pod finishes its requests yet"
    story.kubelet.remove_deleted()
    eventually(lambda: api.find(CLAIM, "llama-cache") is None, "the claim is deleted")
    assert api.get("inferenceservices", "llama")["status"]["readyReplicas"] == 1


def test_a_change_that_is_taken_back_finds_the_cache_as_it_was(api: ApiServer) -> None:
    story = Story(api)
    story.edit(**CHANGES["another claim"])
    eventually(lambda: len(story.kubelet.pods()) == 2, "a pod of the new revision")
    story.edit(**SIZE)
    assert story.wait_ready() == story.old
    assert story.kept()


def test_a_cache_that_no_pod_uses_goes_at_once(api: ApiServer) -> None:
    story = Story(api)
    story.edit(replicas=0)
    eventually(lambda: not story.kubelet.pods(), "the pod stops")
    story.kubelet.remove_deleted()
    story.edit(cache=None)
    eventually(lambda: api.find(CLAIM, "llama-cache") is None, "the claim is deleted")


def test_a_claim_that_the_pods_mount_by_their_template_stays(api: ApiServer) -> None:
    """It is not needed for a cache any more, but the pods that are asked for use it."""
    story = Story(api)
    volume = {"name": "old", "persistentVolumeClaim": {"claimName": "llama-cache"}}
    story.edit(cache=None, replicas=0, podTemplate={"spec": {"volumes": [volume]}})
    eventually(lambda: not story.kubelet.pods(), "the pod stops")
    story.kubelet.remove_deleted()
    eventually(lambda: condition(api, "llama", "Ready")[1] == "ScaledToZero", "nothing runs")
    time.sleep(1.0)
    assert story.kept()
