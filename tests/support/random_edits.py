"""Random edits of InferenceServices and their children by users, from a seed, and the check of what an operator made of them."""

import copy
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import httpx
from apiserver import ApiServer, Refused
from play_kubelet import REVISION, TIME, PlayKubelet

from skiff_operator import plan, spec
from skiff_operator.cache import Objects
from skiff_operator.drift import covers
from skiff_operator.kinds import CHILDREN, CONTROLLER_REVISION, DEPLOYMENT
from skiff_operator.ownership import controller, controller_uid
from skiff_operator.settings import Settings

Object = dict[str, Any]

NAMES: Final = tuple(f"m{number}" for number in range(12))
FOREIGN: Final = (("services", "m0"), ("serviceaccounts", "m1"))
"""Objects of somebody else whose names InferenceServices need."""
LABEL: Final = "serving.skiff.dev/inferenceservice"
_MODELS: Final = (
    {"model": {"uri": "demo://"}, "cache": None},
    {"model": {"uri": "pvc://weights/llama"}, "cache": None},
    {"model": {"uri": "hf://org/model"}, "cache": None},
    {"model": {"uri": "hf://org/model"}, "cache": {"size": "1Gi"}},
)


class RandomEdits:
    """A user who makes one edit at a time. An edit that meets an API server that is away, or no object, is left out."""

    def __init__(self, api: ApiServer, seed: int) -> None:
        self._api = api
        self._random = random.Random(seed)
        self.made: Counter[str] = Counter()
        self._actions: dict[Callable[[], object], int] = {
            self._create: 6,
            self._scale: 4,
            self._change_environment: 4,
            self._change_model: 3,
            self._delete: 2,
            self._rename: 2,
            self._serve: 6,
            self._edit_child: 3,
            self._delete_child: 2,
        }
        foreign = {"spec": {"ports": [{"port": 80}], "selector": {"app": "other"}}}
        for plural, name in FOREIGN:
            body = {"metadata": {"name": name}, **(foreign if plural == "services" else {})}
            api.create(plural, body)
        self._foreign = [api.get(*object_key) for object_key in FOREIGN]

    def edit(self) -> None:
        """Make one edit."""
        action = self._random.choices(list(self._actions), weights=list(self._actions.values()))[0]
        self.made[action.__name__.strip("_")] += self._succeeds(action)

    def assert_foreign_untouched(self) -> None:
        """Fail unless the objects of others are what they were."""
        assert [self._api.get(*object_key) for object_key in FOREIGN] == self._foreign

    def serve_all(self) -> None:
        """Play the kubelet of every InferenceService."""
        for name in NAMES:
            self._succeeds(partial(self._serve, name))

    def _succeeds(self, action: Callable[[], object]) -> bool:
        """Try an edit; False when its object is gone or changed, or the API server is busy or restarts."""
        try:
            action()
        except Refused as refused:
            if refused.status not in (404, 409, 429, 500, 503):
                raise
            return False
        except httpx.HTTPError:
            return False
        return True

    def _create(self) -> None:
        name = self._random.choice(NAMES)
        chosen = copy.deepcopy(self._random.choice(_MODELS))
        body = {
            "apiVersion": "serving.skiff.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": name},
            "spec": {
                **{field: value for field, value in chosen.items() if value is not None},
                "runtime": {"device": "cpu", "env": self._environment()},
                "replicas": self._random.randrange(4),
            },
        }
        self._api.create("inferenceservices", body)

    def _scale(self) -> None:
        self._merge({"replicas": self._random.randrange(4)})

    def _change_environment(self) -> None:
        self._merge({"runtime": {"env": self._environment()}})

    def _change_model(self) -> None:
        self._merge(self._random.choice(_MODELS))

    def _delete(self) -> None:
        self._api.delete("inferenceservices", self._random.choice(NAMES))

    def _rename(self) -> None:
        """Delete an InferenceService, and create it at once under another name."""
        old, new = self._random.sample(NAMES, 2)
        body = self._api.get("inferenceservices", old)
        self._api.delete("inferenceservices", old)
        body["metadata"] = {"name": new}
        body.pop("status", None)
        self._api.create("inferenceservices", body)

    def _edit_child(self) -> None:
        """Change a field that the operator owns."""
        plural, patch = self._random.choice(
            [
                ("deployments", {"spec": {"replicas": 7}}),
                ("deployments", {"metadata": {"labels": {LABEL: None}}}),
                ("services", {"spec": {"selector": {"app": "mine"}}}),
                ("services", {"metadata": {"labels": {"app.kubernetes.io/name": "mine"}}}),
                ("serviceaccounts", {"automountServiceAccountToken": True}),
            ]
        )
        self._api.merge(plural, self._owned_name(plural), patch)

    def _delete_child(self) -> None:
        plural = self._random.choice(("deployments", "services", "serviceaccounts", "poddisruptionbudgets"))
        self._api.delete(plural, self._owned_name(plural))

    def _serve(self, name: str = "") -> None:
        """Play the kubelet of one InferenceService: its pods are ready, those that are deleted go."""
        kubelet = PlayKubelet(self._api, name or self._random.choice(NAMES))
        kubelet.remove_deleted()
        for pod in kubelet.pods():
            if not _is_ready(pod):
                kubelet.report(pod, ready=True, state={"running": {"startedAt": TIME}})

    def _owned_name(self, plural: str) -> str:
        return self._random.choice([name for name in NAMES if (plural, name) not in FOREIGN])

    def _merge(self, fields: Object) -> None:
        self._api.merge("inferenceservices", self._random.choice(NAMES), {"spec": fields})

    def _environment(self) -> list[Object]:
        names = self._random.sample("ABCDE", self._random.randrange(4))
        return [{"name": name, "value": str(self._random.randrange(100))} for name in sorted(names)]


def wrong_statuses(api: ApiServer) -> list[str]:
    """Return which statuses disagree with the children and the pods that exist."""
    live, pods = _children(api), api.list("pods", LABEL)
    return [text for each in api.list("inferenceservices") for text in _wrong_status(each, live, pods)]


def wrong_children(api: ApiServer, settings: Settings) -> list[str]:
    """Return which children differ from those that an operator with these settings makes, or have lost their owner."""
    services = {each["metadata"]["uid"]: each for each in api.list("inferenceservices")}
    live = _children(api)
    found: list[str] = []
    desired: set[tuple[str, str]] = set()
    for uid, service in services.items():
        found += _wrong_children(service, live, settings)
        desired |= {(uid, f"{kind.name} {name}") for kind, name in _objects(service, settings)}
    for (kind, name), obj in live.items():
        owner = controller(obj)
        if kind == CONTROLLER_REVISION and owner.get("uid") in services:
            continue  # its history
        if owner.get("kind") == "InferenceService" and (owner["uid"], f"{kind.name} {name}") not in desired:
            found.append(f"{kind.name} {name} is left of {owner['name']}")
    return found


def _children(api: ApiServer) -> Objects:
    return {
        (kind, each["metadata"]["name"]): {"apiVersion": kind.api_version, "kind": kind.name, **each}
        for kind in CHILDREN
        for each in api.list(kind.plural)
    }


def _objects(service: Object, settings: Settings) -> Objects:
    return plan.objects(spec.parse(service), settings)


def _blocked(name: str) -> bool:
    """Return whether somebody else's object has the name of a child."""
    return any(name == taken for _, taken in FOREIGN)


def _wrong_children(service: Object, live: Objects, settings: Settings) -> list[str]:
    found = []
    name, uid = service["metadata"]["name"], service["metadata"]["uid"]
    for (kind, child), built in _objects(service, settings).items():
        obj = live.get((kind, child))
        if (kind.plural, child) in FOREIGN:
            continue
        if kind == DEPLOYMENT and ("serviceaccounts", name) in FOREIGN:
            continue  # its pods must not run under another's account; whether one exists depends on the order of events
        if obj is None:
            found.append(f"{kind.name} {child} is missing")
        elif controller_uid(obj) != uid:
            found.append(f"{kind.name} {child} belongs to another")
        elif not covers(built, obj) or _variables(built) != _variables(obj):
            found.append(f"{kind.name} {child} differs")
    return found


def _variables(obj: Object) -> list[str]:
    """Return the names of the variables of a Deployment's containers: fields that an edit removed must be gone."""
    containers = obj.get("spec", {}).get("template", {}).get("spec", {}).get("containers", [])
    return sorted(each["name"] for container in containers for each in container.get("env", []))


def _wrong_status(service: Object, live: Objects, pods: list[Object]) -> list[str]:
    meta, status = service["metadata"], service.get("status", {})
    name = meta["name"]
    if status.get("observedGeneration") != meta["generation"]:
        return [f"the status of {name} is of another generation"]
    conditions = {each["type"]: each for each in status["conditions"]}
    if _blocked(name):
        reason = conditions["Degraded"]["reason"]
        return [] if reason == "NameConflict" else [f"{name} reports {reason} over another's object"]
    deployment = live.get((DEPLOYMENT, name))
    revision = deployment["spec"]["template"]["metadata"]["labels"][REVISION] if deployment else ""
    own = [pod for pod in pods if pod["metadata"]["labels"][LABEL] == name and _counts(pod)]
    ready = sum(_is_ready(pod) for pod in own)
    serves = ready == len(own) == service["spec"].get("replicas", 1)
    expected = {"replicas": len(own), "readyReplicas": ready, "updateRevision": revision}
    found = [
        f"{name} reports {status.get(field, 0)!r} {field}, not {value!r}"
        for field, value in expected.items()
        if (status.get(field) or 0) != (value or 0)
    ]
    if (conditions["Ready"]["status"] == "True") != serves:
        found.append(f"{name} reports {conditions['Ready']}, with {ready} of {len(own)} pods ready")
    return found


def _counts(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"] and pod["status"].get("phase") != "Failed"


def _is_ready(pod: Object) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
