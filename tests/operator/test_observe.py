"""The observer: echoes cause no work, late events do not undo newer ones, lost deletions are detected."""

from typing import Any

import pytest
from services import raw, service

from skiff_operator import plan, status
from skiff_operator.cache import Cache
from skiff_operator.kinds import DEPLOYMENT, INFERENCE_SERVICE, POD, SERVICE, Kind, Stage
from skiff_operator.observe import Observer, ReconcileRequest
from skiff_operator.settings import Settings
from skiff_operator.watch_streams import Event, StreamKey

KEY = ("default", "llama")
LABEL = "serving.skiff.dev/inferenceservice"
CHILDREN = ReconcileRequest(KEY, Stage.CHILDREN)
STATUS = ReconcileRequest(KEY, Stage.STATUS)


@pytest.fixture
def observer() -> Observer:
    """An observer that knows the service of `services.raw` and nothing else."""
    observer = Observer(Cache(), Settings())
    observer.observe(INFERENCE_SERVICE, raw(), "ADDED")
    return observer


def live(kind: Kind, version: int = 10, generation: int = 1, **changes: Any) -> dict[str, Any]:
    """A child as the API server has it, with changes of top-level fields."""
    obj: dict[str, Any] = plan.objects(service(), Settings())[(kind, "llama")]
    meta = {"uid": f"{kind.name}-1", "resourceVersion": str(version), "generation": generation}
    return {**obj, "metadata": {**obj["metadata"], **meta}, **changes}


def pod_of(deployment: str, **meta: Any) -> dict[str, Any]:
    """A pod with our label, made by the ReplicaSet of a Deployment."""
    labels = {"serving.skiff.dev/inferenceservice": "llama", "pod-template-hash": "7d9f"}
    owner = {"kind": "ReplicaSet", "name": f"{deployment}-7d9f", "uid": "r", "controller": True}
    own: dict[str, Any] = {
        "name": f"{deployment}-7d9f-x",
        "uid": "p",
        "namespace": "default",
        "ownerReferences": [owner],
    }
    own["resourceVersion"] = "5"
    return {"metadata": {**own, "labels": labels, **meta}}


def child_intact(observer: Observer, kind: Kind) -> bool:
    """Return whether a child is known and in sync."""
    return observer.cache.get_or_create(KEY).children[(kind, "llama")].in_sync


def test_the_echo_of_our_own_write_is_no_news(observer: Observer) -> None:
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT))
    assert observer.observe(DEPLOYMENT, live(DEPLOYMENT), "ADDED") is None


def test_an_event_that_was_overtaken_changes_nothing(observer: Observer) -> None:
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT, version=12))
    drifted = live(DEPLOYMENT, version=11, generation=2, spec={"replicas": 9})
    assert observer.observe(DEPLOYMENT, drifted, "MODIFIED") is None
    assert child_intact(observer, DEPLOYMENT)


def test_a_changed_spec_is_drift_and_a_changed_status_is_not(observer: Observer) -> None:
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT))
    status = {"observedGeneration": 1, "replicas": 1}
    assert observer.observe(DEPLOYMENT, live(DEPLOYMENT, 11, status=status), "MODIFIED") == STATUS
    assert observer.observe(DEPLOYMENT, live(DEPLOYMENT, 12, status=status), "MODIFIED") is None
    drifted = live(DEPLOYMENT, 13, generation=2, spec={"replicas": 9})
    assert observer.observe(DEPLOYMENT, drifted, "MODIFIED") == CHILDREN
    assert not child_intact(observer, DEPLOYMENT)


def test_kinds_without_a_generation_are_compared(observer: Observer) -> None:
    observer.observe_applied(SERVICE, KEY, live(SERVICE, generation=0))
    assert observer.observe(SERVICE, live(SERVICE, 11, generation=0), "MODIFIED") is None
    wrong = live(SERVICE, 12, generation=0, spec={"type": "ClusterIP", "selector": {"a": "b"}})
    assert observer.observe(SERVICE, wrong, "MODIFIED") == CHILDREN
    assert observer.observe(SERVICE, live(SERVICE, 13, generation=0), "MODIFIED") == STATUS
    assert child_intact(observer, SERVICE)


def test_a_lost_label_or_owner_is_drift(observer: Observer) -> None:
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT))
    orphan = live(DEPLOYMENT, 11)
    orphan["metadata"]["ownerReferences"] = []
    assert observer.observe(DEPLOYMENT, orphan, "MODIFIED") == CHILDREN


def test_what_is_listed_at_first_is_compared(observer: Observer) -> None:
    drifted = live(DEPLOYMENT, spec={"replicas": 9})
    assert observer.observe(DEPLOYMENT, drifted, "LISTED") == CHILDREN


def test_the_deletion_of_a_predecessor_does_not_hide_its_successor(observer: Observer) -> None:
    successor = live(DEPLOYMENT, 20)
    successor["metadata"]["uid"] = "Deployment-2"
    observer.observe(DEPLOYMENT, successor, "ADDED")
    observer.observe(DEPLOYMENT, live(DEPLOYMENT, 21), "DELETED")
    assert (DEPLOYMENT, "llama") in observer.cache.get_or_create(KEY).children


def test_an_edit_is_news_and_our_own_status_is_not(observer: Observer) -> None:
    edited = raw(replicas=2)
    edited["metadata"].update(generation=2, resourceVersion="5")
    assert observer.observe(INFERENCE_SERVICE, edited, "MODIFIED") == CHILDREN._replace(edited=True)
    found = observer.cache.get_or_create(KEY).service
    assert found is not None and found.spec.replicas == 2


def test_an_impossible_edit_keeps_the_last_good_spec(observer: Observer) -> None:
    edited = raw(replicas="many")
    edited["metadata"].update(generation=2, resourceVersion="5")
    observer.observe(INFERENCE_SERVICE, edited, "MODIFIED")
    entry = observer.cache.get_or_create(KEY)
    assert entry.invalid is not None and entry.service is not None


def test_nothing_is_remembered_of_what_is_gone(observer: Observer) -> None:
    pod = pod_of("llama")
    observer.observe(POD, pod, "ADDED")
    observer.observe(DEPLOYMENT, live(DEPLOYMENT), "ADDED")
    events: list[tuple[Kind, dict[str, Any], Event]] = [
        (INFERENCE_SERVICE, raw(), "DELETED"),
        (DEPLOYMENT, live(DEPLOYMENT), "DELETED"),
        (POD, pod, "DELETED"),
    ]
    for kind, obj, event in events:
        observer.observe(kind, obj, event)
    assert observer.cache.get(KEY) is None


def test_the_end_of_a_list_shows_which_deletions_no_watch_reported(observer: Observer) -> None:
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT, 10))
    observer.observe_applied(SERVICE, KEY, live(SERVICE, 10))
    assert observer.observe_list_end(StreamKey(DEPLOYMENT, None), set(), 10) == [CHILDREN]
    assert list(observer.cache.get_or_create(KEY).children) == [(SERVICE, "llama")]
    assert observer.observe_list_end(StreamKey(INFERENCE_SERVICE, None), set(), 10) == [CHILDREN]
    assert not observer.cache.get_or_create(KEY).present


def test_what_is_made_after_a_list_was_taken_is_not_missed_in_it(observer: Observer) -> None:
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT, 11))
    assert observer.observe_list_end(StreamKey(DEPLOYMENT, None), set(), 10) == []
    assert child_intact(observer, DEPLOYMENT)


def test_a_list_of_one_namespace_says_nothing_of_another() -> None:
    observer = Observer(Cache(), Settings(namespaces=("default", "other")))
    for name in ("default", "other"):
        observer.observe(INFERENCE_SERVICE, raw(namespace=name, uid=f"u-{name}"), "ADDED")
    assert observer.observe_list_end(StreamKey(INFERENCE_SERVICE, "default"), set(), 10) == [CHILDREN]
    assert list(observer.cache) == [("other", "llama")]


def test_an_answer_that_its_deletion_has_overtaken_is_dropped(observer: Observer) -> None:
    observer.observe(DEPLOYMENT, live(DEPLOYMENT, 10), "ADDED")
    observer.observe(DEPLOYMENT, live(DEPLOYMENT, 11), "DELETED")
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT, 10))
    assert not observer.cache.get_or_create(KEY).children
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT, 12))
    assert child_intact(observer, DEPLOYMENT)


def test_an_answer_that_drift_has_overtaken_does_not_hide_it(observer: Observer) -> None:
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT, 10))
    drifted = live(DEPLOYMENT, 12, generation=3, spec={"replicas": 9})
    assert observer.observe(DEPLOYMENT, drifted, "MODIFIED") == CHILDREN
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT, 11))
    assert not child_intact(observer, DEPLOYMENT)


def test_a_deletion_of_what_was_never_seen_is_no_news(observer: Observer) -> None:
    assert observer.observe(DEPLOYMENT, live(DEPLOYMENT, 11), "DELETED") is None


def test_a_child_with_the_label_of_another_service_is_drift_of_its_owner(observer: Observer) -> None:
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT))
    relabelled = live(DEPLOYMENT, 11)
    relabelled["metadata"]["labels"] = {**relabelled["metadata"]["labels"], LABEL: "another"}
    assert observer.observe_new_owner(DEPLOYMENT, relabelled) is None
    assert observer.observe(DEPLOYMENT, relabelled, "MODIFIED") == CHILDREN
    assert not child_intact(observer, DEPLOYMENT)


def test_a_pod_that_is_given_to_another_service_leaves_the_first(observer: Observer) -> None:
    observer.observe(POD, pod_of("llama"), "ADDED")
    labels = {**pod_of("llama")["metadata"]["labels"], LABEL: "another"}
    assert observer.observe_new_owner(POD, pod_of("llama", labels=labels)) == STATUS
    observer.observe(POD, pod_of("llama", labels=labels), "MODIFIED")
    assert not observer.cache.get_or_create(KEY).pods
    observer.observe(POD, pod_of("llama", labels=labels), "DELETED")
    assert observer.cache.get(("default", "another")) is None


def foreign(name: str, kind: Kind = DEPLOYMENT) -> dict[str, Any]:
    """An object with our label that another one controls."""
    obj = live(kind, 30)
    owner = {**obj["metadata"]["ownerReferences"][0], "uid": "somebody-else"}
    meta = {"name": name, "uid": "foreign", "ownerReferences": [owner]}
    return {**obj, "metadata": {**obj["metadata"], **meta}, "spec": {"replicas": 7}}


@pytest.mark.parametrize("name", ["llama", "stranger"])
def test_objects_of_others_with_our_label_are_no_children(observer: Observer, name: str) -> None:
    observer.observe_applied(DEPLOYMENT, KEY, live(DEPLOYMENT))
    entry = observer.cache.get_or_create(KEY)
    children, rollout = dict(entry.children), entry.rollout
    for event in ("LISTED", "ADDED", "MODIFIED"):
        assert observer.observe(DEPLOYMENT, foreign(name), event) is None
    observer.observe(DEPLOYMENT, foreign(name), "DELETED")
    assert (entry.children, entry.rollout) == (children, rollout)


@pytest.mark.parametrize(
    "pod",
    [
        pod_of("stranger"),
        pod_of("llama-2"),
        pod_of("llama", ownerReferences=[]),
        pod_of("llama", ownerReferences=[{"kind": "StatefulSet", "name": "llama-7d9f", "controller": True}]),
        pod_of("llama", ownerReferences=[{"kind": "ReplicaSet", "name": "llama-7d9f", "controller": False}]),
        pod_of("llama", labels={"serving.skiff.dev/inferenceservice": "llama"}),
    ],
)
def test_pods_of_others_with_our_label_are_not_counted(observer: Observer, pod: dict[str, Any]) -> None:
    assert observer.observe(POD, pod, "ADDED") is None
    assert observer.cache.get_or_create(KEY).pods == {}
    assert observer.observe(POD, pod_of("llama"), "ADDED") == STATUS
    assert list(observer.cache.get_or_create(KEY).pods) == ["llama-7d9f-x"]


def test_the_response_to_our_own_status_does_not_hide_a_later_version(observer: Observer) -> None:
    """Otherwise each later write would be refused as one of an old version, and no event would mend that."""
    annotated = raw()
    annotated["metadata"].update(resourceVersion="11", annotations={"team": "search"})
    observer.observe(INFERENCE_SERVICE, annotated, "MODIFIED")
    response = raw()
    response["metadata"]["resourceVersion"] = "10"
    written = status.Status(1, 1, 0, 0, "", "", "", ())
    observer.observe_status(KEY, response, written)
    entry = observer.cache.get_or_create(KEY)
    assert entry.resource_version == "11" and entry.status is not written
    response["metadata"]["resourceVersion"] = "12"
    observer.observe_status(KEY, response, written)
    assert entry.resource_version == "12" and entry.status is written
