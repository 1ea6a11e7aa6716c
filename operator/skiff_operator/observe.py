"""The observer: folds what lists and watches show into the cache.

Each fold answers which InferenceService must be looked at again and how urgently, or None when nothing
changed that matters (the echo of our own write, a heartbeat).
"""

from typing import Any, NamedTuple

import msgspec

from skiff_operator import ownership, plan, spec, status, workload
from skiff_operator.cache import Cache, Child, Entry, Record
from skiff_operator.drift import covers
from skiff_operator.errors import InvalidSpec
from skiff_operator.kinds import DEPLOYMENT, INFERENCE_SERVICE, POD, Kind, Stage
from skiff_operator.resources import containers
from skiff_operator.resources.metadata import digest, stamp_of
from skiff_operator.settings import Settings
from skiff_operator.watch_streams import Event, StreamKey
from skiff_operator.workqueue import Key
from skiff_runtime import contract


class Attention(NamedTuple):
    """An InferenceService to look at, and the most urgent work that the event may have caused.

    `edited`: its spec is another one than before, so earlier failures say nothing of it.
    """

    key: Key
    stage: Stage
    edited: bool = False


class Observer:
    """Keeps one cache true to the cluster."""

    def __init__(self, cache: Cache, settings: Settings) -> None:
        """Fill `cache`; `settings` decide which namespaces are read and what is desired."""
        self.cache = cache
        self._settings = settings
        self._shown: dict[StreamKey, int] = {}

    def listed(self, stream: StreamKey, shown: set[str], resource_version: int) -> list[Attention]:
        """Take in the end of a list: forget what it did not show, for that was deleted while no watch reported it.

        What is newer than the list was written by us after it was made, and stays.
        """
        self._shown[stream] = resource_version
        gone = [
            record
            for record in self.cache.records(stream.kind)
            if stream.namespace in (None, record.key[0])
            and record.uid not in shown
            and record.version <= resource_version
        ]
        return [self._forget(stream.kind, record) for record in gone]

    def moved(self, kind: Kind, obj: dict[str, Any]) -> Attention | None:
        """Forget an object under the InferenceService that it belonged to until now, if that is another one."""
        home = self.cache.home(obj["metadata"]["uid"])
        if kind == INFERENCE_SERVICE or home is None or home == _key(kind, obj):
            return None
        return self._forget(kind, Record(home, obj["metadata"]["name"], obj["metadata"]["uid"]))

    def fold(self, kind: Kind, obj: dict[str, Any], event: Event) -> Attention | None:
        """Take in one object as a list or a watch event showed it."""
        meta, key = obj["metadata"], _key(kind, obj)
        if event != "LISTED":
            self._shown[self._stream(kind, key)] = int(meta["resourceVersion"])
        if event == "DELETED":
            if kind != INFERENCE_SERVICE and self.cache.home(meta["uid"]) is None:
                return None
            return self._forget(kind, Record(key, meta["name"], meta["uid"]))
        if kind == INFERENCE_SERVICE:
            return self._fold_service(key, obj)
        return self._fold_pod(key, obj) if kind == POD else self._fold_child(kind, key, obj, event)

    def applied(self, kind: Kind, key: Key, obj: dict[str, Any]) -> None:
        """Take in the API server's answer to our own apply: it holds what we asked for.

        Events may overtake the answer. It is dropped when the cache holds a newer version, and when the watch has
        gone beyond it without showing the object any more: it was deleted meanwhile.
        """
        meta, entry = obj["metadata"], self.cache.touch(key)
        known = entry.children.get((kind, meta["name"]))
        if known is not None and known.uid == meta["uid"]:
            late = int(meta["resourceVersion"]) < int(known.resource_version)
        else:
            watched = contract.LABEL_SERVICE in (meta.get("labels") or {})
            late = watched and int(meta["resourceVersion"]) <= self._shown.get(self._stream(kind, key), 0)
        if not late:
            self.cache.put_child(key, kind, meta["name"], _child(obj, intact=True))
            if kind == DEPLOYMENT:
                entry.rollout = workload.read_rollout(obj)
        self.cache.sweep(key)

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
        self.cache.drop(kind, record)
        return Attention(record.key, Stage.STATUS if kind == POD else Stage.CHILDREN)

    def _stream(self, kind: Kind, key: Key) -> StreamKey:
        """Return the stream that shows the objects of a kind in the namespace of `key`."""
        return StreamKey(kind, self._settings.watch_scope(key[0]))

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
            child = msgspec.structs.replace(child, intact=self._intact(kind, key, obj, event))
        self.cache.put_child(key, kind, meta["name"], child)
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
        self.cache.put_pod(key, state)
        return Attention(key, Stage.STATUS)

    def _intact(self, kind: Kind, key: Key, obj: dict[str, Any], event: Event) -> bool:
        """Whether a live child holds all that is desired now; one that is not desired needs no repair."""
        entry = self.cache.touch(key)
        if entry.service is None or entry.invalid is not None:
            return True
        try:
            draft = entry.draft or plan.objects(entry.service, self._settings)
        except InvalidSpec:
            return True
        if event == "LISTED" and entry.draft is None:  # each kind's list will ask for it again
            entry.draft, entry.wanted = draft, plan.summarize(draft)
        desired = draft.get((kind, obj["metadata"]["name"]))
        return desired is None or covers(desired, obj)


def _key(kind: Kind, obj: dict[str, Any]) -> Key:
    """Return the InferenceService that an object is or belongs to: by its controller, and by its label for a pod.

    The controller comes first, so that a child whose label was changed is repaired and not taken for another's.
    """
    meta = obj["metadata"]
    if kind == INFERENCE_SERVICE:
        return meta["namespace"], meta["name"]
    for owner in meta.get("ownerReferences") or []:
        if owner.get("controller") and owner["kind"] == INFERENCE_SERVICE.name:
            return meta["namespace"], owner["name"]
    return meta["namespace"], meta["labels"][contract.LABEL_SERVICE]


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
