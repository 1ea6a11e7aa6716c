"""Strangers' objects under every name that InferenceServices need, and the proof that an operator leaves them alone.

The operator's tests drive it on a bare API server and the end-to-end test through kubectl; both give a `Cluster`.
"""

import copy
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from operator_process import eventually
from services import hub, raw

from skiff_operator import plan, revisions, spec
from skiff_operator.kinds import CHILDREN, CONTROLLER_REVISION
from skiff_operator.resources import controller_revision
from skiff_operator.resources.metadata import LABEL_REVISION
from skiff_operator.revisions import Observed
from skiff_operator.settings import Settings

Object = dict[str, Any]
ObjectKey = tuple[str, str]
"""Plural of a kind, and a name."""

SPEC: Object = {
    "model": hub(),
    "runtime": {"device": "cpu", "image": "localhost/stranger:1"},
    "replicas": 2,
    "cache": {"size": "1Gi"},
    "networkPolicy": {},
}
"""A spec that needs a child of every kind. With an image of its own, its revision does not depend on the operator's."""
SMALLER: Object = {"replicas": 1, "cache": None, "networkPolicy": None}
"""An edit after which no claim, PodDisruptionBudget or NetworkPolicy is needed."""
SHORT = {kind.plural: kind.name.lower() for kind in CHILDREN}
PLURALS = {kind.name: kind.plural for kind in CHILDREN}
REVISIONS = CONTROLLER_REVISION.plural
FLAVOURS = ("identical", "unlabelled", "controlled")
OWN_NAMES = ("default", "skiff-operator")
QUIET_SECONDS = 2.0


class Cluster(Protocol):
    """One namespace of a cluster, by whole JSON objects."""

    namespace: str

    def find(self, plural: str, name: str) -> Any:
        """Return one object with its managedFields, or None."""

    def create(self, plural: str, body: Any) -> Any:
        """Create an object and return it."""

    def merge(self, plural: str, name: str, patch: Any) -> Any:
        """Apply a JSON merge patch."""

    def delete(self, plural: str, name: str) -> Any:
        """Delete one object."""


def inference_service(name: str, **fields: Any) -> Object:
    """Build an InferenceService with `fields` as its spec; without any, one that needs a child of every kind."""
    body = raw(name, **(fields or copy.deepcopy(SPEC)))
    body["metadata"] = {"name": name}
    return body


def children(name: str, namespace: str) -> Iterator[tuple[ObjectKey, Object]]:
    """Yield what the operator would make for `inference_service(name)`, without the owner."""
    service = spec.parse(raw(name, namespace=namespace, **copy.deepcopy(SPEC)))
    objects = plan.objects(service, Settings())
    template = plan.built_deployment(objects)["spec"]["template"]
    target = revisions.choose(service, template["metadata"]["labels"][LABEL_REVISION], Observed())
    objects[(CONTROLLER_REVISION, target.name)] = controller_revision.build(
        service, target, template, number=1
    )
    for (kind, child), built in objects.items():
        obj = copy.deepcopy(built)
        del obj["metadata"]["ownerReferences"]
        yield (kind.plural, child), obj


class Strangers:
    """Objects that are not the operator's, in a namespace whose quota keeps every Deployment from making pods."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.object_keys: list[ObjectKey] = []
        self._before: dict[ObjectKey, str] = {}
        no_pods = {"metadata": {"name": "no-pods"}, "spec": {"hard": {"pods": "0"}}}
        cluster.create("resourcequotas", no_pods)
        eventually(lambda: cluster.find("serviceaccounts", "default"), "the namespace's default account")
        owner = cluster.create("leases", {"metadata": {"name": "owner"}})
        self._owner = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "name": "owner",
            "uid": owner["metadata"]["uid"],
            "controller": True,
        }

    def take(self, name: str, flavour: str, plurals: Iterable[str] = tuple(SHORT)) -> None:
        """Create the children of the InferenceService `name` that are of these kinds, as somebody else's."""
        for (plural, child), obj in children(name, self._cluster.namespace):
            if plural in plurals:
                self.create(plural, self._disguise(obj, flavour), child)

    def create(self, plural: str, obj: Object, name: str) -> None:
        """Create an object, unless the cluster itself has made one of its name."""
        if self._cluster.find(plural, name) is None:
            self._cluster.create(plural, obj)
        self.object_keys.append((plural, name))

    def remember(self) -> None:
        """Wait until the cluster's own controllers leave the objects as they are, and keep these."""
        changed_at, self._before = time.monotonic(), self._now()

        def quiet() -> bool:
            nonlocal changed_at
            now = self._now()
            if now != self._before:
                changed_at, self._before = time.monotonic(), now
            return time.monotonic() - changed_at > QUIET_SECONDS

        eventually(quiet, "the strangers' objects change no more", every_seconds=0.2)

    def check(self) -> None:
        """Fail unless every object is what it was, to the byte."""
        now = self._now()
        changed = [
            object_key for object_key in self.object_keys if now[object_key] != self._before[object_key]
        ]
        assert not changed, {
            object_key: (self._before[object_key], now[object_key]) for object_key in changed
        }

    def give_back(self) -> None:
        """Delete all of them."""
        for plural, name in self.object_keys:
            self._cluster.delete(plural, name)

    def _disguise(self, obj: Object, flavour: str) -> Object:
        if flavour == "unlabelled":
            del obj["metadata"]["labels"], obj["metadata"]["annotations"]
        elif flavour == "controlled":
            obj["metadata"]["ownerReferences"] = [self._owner]
        return obj

    def _now(self) -> dict[ObjectKey, str]:
        return {
            object_key: json.dumps(self._cluster.find(*object_key), sort_keys=True)
            for object_key in self.object_keys
        }


def condition(cluster: Cluster, name: str, kind: str = "Degraded") -> tuple[str, str, str]:
    """Return status, reason and message of a condition that was observed for the present generation."""
    found = cluster.find("inferenceservices", name)
    status = found.get("status", {})
    if status.get("observedGeneration") != found["metadata"]["generation"]:
        return "", "", ""
    each = next(each for each in status["conditions"] if each["type"] == kind)
    return each["status"], each["reason"], each["message"]


def conflicts(cluster: Cluster, name: str) -> str:
    """Return the message of a NameConflict; empty when there is none."""
    status, reason, message = condition(cluster, name)
    return message if (status, reason) == ("True", "NameConflict") else ""


def play(cluster: Cluster) -> None:
    """Let InferenceServices live and end among strangers' objects, and fail if one of these is touched."""
    strangers = Strangers(cluster)
    single = {f"{SHORT[plural]}-{flavour}": (plural, flavour) for plural in SHORT for flavour in FLAVOURS}
    for name in OWN_NAMES:
        strangers.take(name, "unlabelled")
    for name, (plural, flavour) in single.items():
        strangers.take(name, flavour, [plural])
    strangers.remember()
    names = [*single, *OWN_NAMES]
    for name in names:
        made = cluster.create("inferenceservices", inference_service(name))
        cluster.create("leases", _witness(made))
    _all_conflict(cluster, names)
    strangers.check()
    for name in names:
        cluster.merge("inferenceservices", name, {"spec": {"replicas": 3, "drain": {"timeoutSeconds": 7}}})
    # Another spec has a ControllerRevision of another name.
    _all_conflict(
        cluster, [*OWN_NAMES, *(name for name, (plural, _) in single.items() if plural != REVISIONS)]
    )
    strangers.check()
    for name in names:
        cluster.merge("inferenceservices", name, {"spec": SMALLER})
    needed = ("serviceaccounts", "deployments", "services")
    _all_conflict(cluster, [*OWN_NAMES, *(name for name, (plural, _) in single.items() if plural in needed)])
    strangers.check()
    for name in names:
        cluster.delete("inferenceservices", name)
    for name in names:
        eventually(lambda name=name: cluster.find("leases", name) is None, f"what {name} owned is collected")  # type: ignore[misc]
    _only_strangers_remain(cluster, names, strangers)
    strangers.check()


def _witness(service: Object) -> Object:
    """An object that the garbage collector deletes after the InferenceService."""
    meta = service["metadata"]
    owner = {key: service[key] for key in ("apiVersion", "kind")} | {"name": meta["name"], "uid": meta["uid"]}
    return {"metadata": {"name": meta["name"], "ownerReferences": [owner]}}


def _all_conflict(cluster: Cluster, names: list[str]) -> None:
    for name in names:
        eventually(lambda name=name: conflicts(cluster, name), f"{name} reports NameConflict")  # type: ignore[misc]


def _only_strangers_remain(cluster: Cluster, names: list[str], strangers: Strangers) -> None:
    ours = [object_key for name in names for object_key, _ in children(name, cluster.namespace)]

    def gone() -> bool:
        return not [
            object_key
            for object_key in ours
            if object_key not in strangers.object_keys and cluster.find(*object_key)
        ]

    eventually(gone, "what the operator made is gone")
