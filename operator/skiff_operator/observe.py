"""The only reader of the cluster: lists once at start, then folds watch events into the cache.

Each fold answers which InferenceService must be looked at again and how urgently, or None when nothing
changed that matters (the echo of our own write, a heartbeat).
"""

from typing import Any, Final, Literal, NamedTuple

import msgspec

from skiff_operator import ownership, plan, spec, status, workload
from skiff_operator.cache import Cache, Child, Entry, Record
from skiff_operator.client import Client
from skiff_operator.drift import covers
from skiff_operator.errors import ApiNotFound, InvalidSpec, OperatorError
from skiff_operator.kinds import CHILDREN, DEPLOYMENT, INFERENCE_SERVICE, POD, Kind, Stage
from skiff_operator.resources import containers
from skiff_operator.resources.metadata import digest, stamp_of
from skiff_operator.settings import Settings
from skiff_operator.workqueue import Key
from skiff_runtime import contract

Event = Literal["LISTED", "ADDED", "MODIFIED", "DELETED"]


class Attention(NamedTuple):
    """An InferenceService to look at, and the most urgent work that the event may have caused.

    `edited`: its spec is another one than before, so earlier failures say nothing of it.
    """

    key: Key
    stage: Stage
    edited: bool = False


class Relist:
    """The objects that a watch showed since it began anew."""

    QUIET_SECONDS: Final = 10.0

    def __init__(self) -> None:
        """Begin with nothing seen."""
        self._seen: set[str] = set()
        self._last = 0.0

    def __contains__(self, uid: str) -> bool:
        """Whether an object was shown."""
        return uid in self._seen

    def note(self, uid: str, now: float) -> None:
        """An object of the list itself."""
        self._seen.add(uid)
        self._last = now

    def add(self, uid: str) -> None:
        """An object that a later event showed."""
        self._seen.add(uid)

    def finished(self, now: float) -> bool:
        """Whether the list has come to its end, as far as a pause tells."""
        return now - self._last > self.QUIET_SECONDS


class Observer:
    """Keeps one cache true to the cluster."""

    def __init__(self, cache: Cache, settings: Settings) -> None:
        """Fill `cache`; `settings` decide which namespaces are read and what is desired."""
        self.cache = cache
        self._settings = settings
        self._priming = False
        self._relists: dict[Kind, Relist] = {}

    async def prime(self, client: Client) -> None:
        """Read everything once, InferenceServices first, so that children can be compared with what is desired.

        Raises:
            OperatorError: the CustomResourceDefinition is missing, or the API server refuses to list.
        """
        self._priming = True
        for kind in (INFERENCE_SERVICE, *CHILDREN, POD):
            selector = "" if kind == INFERENCE_SERVICE else contract.LABEL_SERVICE
            for namespace in self._settings.namespaces or (None,):
                try:
                    async for obj in client.list(kind, namespace, selector=selector):
                        self.fold(kind, obj, "LISTED")
                except ApiNotFound as error:
                    raise OperatorError(
                        f"the API server does not know {kind.plural}.{kind.group}; "
                        "apply manifests/crds first (the chart does it by itself)"
                    ) from error
        self._priming = False

    def relisted(self, kind: Kind, uid: str, now: float) -> None:
        """Note that a watch began anew and showed this object; `now` is in seconds of a monotonic clock."""
        self._relists.setdefault(kind, Relist()).note(uid, now)

    def sweep(self, now: float) -> list[Attention]:
        """Forget what a finished relist did not show: it was deleted while the watch was broken."""
        found = []
        for kind in [kind for kind, relist in self._relists.items() if relist.finished(now)]:
            relist = self._relists.pop(kind)
            gone = [record for record in self.cache.records(kind) if record.uid not in relist]
            found += [self._forget(kind, record) for record in gone]
        return found

    def fold(self, kind: Kind, obj: dict[str, Any], event: Event) -> Attention | None:
        """Take in one object as a list or a watch event showed it."""
        meta = obj["metadata"]
        if event != "DELETED" and kind in self._relists:
            self._relists[kind].add(meta["uid"])
        if kind == INFERENCE_SERVICE:
            key = (meta["namespace"], meta["name"])
            record = Record(key, meta["name"], meta["uid"])
            return self._forget(kind, record) if event == "DELETED" else self._fold_service(key, obj)
        key = (meta["namespace"], meta["labels"][contract.LABEL_SERVICE])
        if event == "DELETED":
            return self._forget(kind, Record(key, meta["name"], meta["uid"]))
        return self._fold_pod(key, obj) if kind == POD else self._fold_child(kind, key, obj, event)

    def applied(self, kind: Kind, key: Key, obj: dict[str, Any]) -> None:
        """Take in the API server's answer to our own apply: it holds what we asked for."""
        entry, child = self.cache.touch(key), _child(obj, intact=True)
        entry.children[(kind, obj["metadata"]["name"])] = child
        if kind in self._relists:
            self._relists[kind].add(child.uid)
        if kind == DEPLOYMENT:
            entry.rollout = workload.read_rollout(obj)

    def deleted(self, kind: Kind, key: Key, name: str, uid: str) -> None:
        """Take in that we deleted a child."""
        self._forget(kind, Record(key, name, uid))

    def reported(self, key: Key, obj: dict[str, Any], written: status.Status) -> None:
        """Take in the API server's answer to our own status, so that its echo is no news."""
        entry = self.cache.touch(key)
        if entry.uid == obj["metadata"]["uid"]:
            entry.status = written
            if obj["metadata"]["generation"] == entry.generation:
                entry.resource_version = obj["metadata"]["resourceVersion"]

    def _forget(self, kind: Kind, record: Record) -> Attention:
        """Drop an object that is gone, unless a newer one of its name has been seen meanwhile."""
        key, name, uid = record
        entry = self.cache.touch(key)
        if kind == INFERENCE_SERVICE:
            if entry.uid == uid:
                entry.leave()
        elif kind == POD:
            if name in entry.pods and entry.pods[name].uid == uid:
                del entry.pods[name]
        elif (kind, name) in entry.children and entry.children[(kind, name)].uid == uid:
            del entry.children[(kind, name)]
            if kind == DEPLOYMENT and name == key[1]:
                entry.rollout = None
        self.cache.sweep(key)
        return Attention(key, Stage.STATUS if kind == POD else Stage.CHILDREN)

    def _fold_service(self, key: Key, obj: dict[str, Any]) -> Attention | None:
        meta = obj["metadata"]
        entry = self.cache.touch(key)
        if entry.uid == meta["uid"] and not _newer(meta, entry.resource_version):
            return None
        changed = (entry.uid, entry.generation) != (meta["uid"], meta["generation"])
        entry.uid, entry.resource_version = meta["uid"], meta["resourceVersion"]
        entry.deleting = "deletionTimestamp" in meta
        entry.status = status.read(obj.get("status"))
        if not changed:
            return Attention(key, Stage.STATUS)
        entry.generation = meta["generation"]
        _take_spec(entry, obj)
        return Attention(key, Stage.CHILDREN, edited=True)

    def _fold_child(self, kind: Kind, key: Key, obj: dict[str, Any], event: Event) -> Attention | None:
        entry, meta = self.cache.touch(key), obj["metadata"]
        known = entry.children.get((kind, meta["name"]))
        if known is not None and known.uid == meta["uid"] and not _newer(meta, known.resource_version):
            return None
        child = _child(obj, intact=True)
        if entry.present and child.owner != entry.uid and (known is None or known.uid != child.uid):
            return None  # somebody else's, although it carries our label
        if event != "ADDED" and (known is None or _moved(kind, known, child)):
            child = msgspec.structs.replace(child, intact=self._intact(kind, key, obj))
        entry.children[(kind, meta["name"])] = child
        same = known is not None and (known.digest, known.intact, child.intact) == (child.digest, True, True)
        if kind == DEPLOYMENT and meta["name"] == key[1]:
            rollout = workload.read_rollout(obj)
            same = same and entry.rollout == rollout
            entry.rollout = rollout
        if same:
            return None
        return Attention(key, Stage.STATUS if child.intact else Stage.CHILDREN)

    def _fold_pod(self, key: Key, obj: dict[str, Any]) -> Attention | None:
        if not workload.runs_in(obj, key[1]):
            return None
        entry, name = self.cache.touch(key), obj["metadata"]["name"]
        gpu = containers.gpu_resource(entry.service, self._settings) if entry.service else ""
        state = workload.read_pod(obj, gpu_resource=gpu or self._settings.gpu_resource_name)
        if entry.pods.get(name) == state:
            return None
        entry.pods[name] = state
        return Attention(key, Stage.STATUS)

    def _intact(self, kind: Kind, key: Key, obj: dict[str, Any]) -> bool:
        """Whether a live child holds all that is desired now; one that is not desired needs no repair."""
        entry = self.cache.touch(key)
        if entry.service is None or entry.invalid is not None:
            return True
        try:
            draft = entry.draft or plan.objects(entry.service, self._settings)
        except InvalidSpec:
            return True
        if self._priming and entry.draft is None:  # each kind's list will ask for it again
            entry.draft, entry.wanted = draft, plan.summarize(draft)
        desired = draft.get((kind, obj["metadata"]["name"]))
        return desired is None or covers(desired, obj)


def _take_spec(entry: Entry, obj: dict[str, Any]) -> None:
    """Parse a new generation. An impossible one leaves the last valid one at work and is reported."""
    entry.wanted = entry.draft = entry.problem = entry.invalid = None
    try:
        entry.service = spec.parse(obj)
    except InvalidSpec as error:
        entry.invalid = error


def _child(obj: dict[str, Any], *, intact: bool) -> Child:
    meta = obj["metadata"]
    owners = meta.get("ownerReferences") or []
    return Child(
        uid=meta["uid"],
        resource_version=meta["resourceVersion"],
        generation=meta.get("generation", 0),
        digest=stamp_of(obj),
        shape=digest([meta.get("labels"), owners]),
        owner=ownership.controller_uid(obj),
        intact=intact,
    )


def _moved(kind: Kind, known: Child, child: Child) -> bool:
    """Whether fields that we own may have changed; what a kind's generation does not count must be compared."""
    if not known.intact or known.shape != child.shape or not kind.versioned_spec:
        return True
    return known.generation != child.generation


def _newer(meta: dict[str, Any], known_version: str) -> bool:
    """Whether an object is newer than what is known; events may be overtaken by answers to our own writes."""
    return int(meta["resourceVersion"]) > int(known_version)
