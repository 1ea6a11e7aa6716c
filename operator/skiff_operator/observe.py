"""The observer: writes the objects that lists and watches deliver into the cache.

Each method returns the InferenceService that must be reconciled and how urgently, or None when nothing changed
that matters (the echo of our own write, a heartbeat).
"""

from typing import Any, NamedTuple

import msgspec

from skiff_operator import ownership, plan, revisions, spec, startup, status, workload
from skiff_operator.cache import Cache, Child, Entry, Record
from skiff_operator.drift import covers
from skiff_operator.errors import InvalidSpec
from skiff_operator.kinds import CONTROLLER_REVISION, DEPLOYMENT, INFERENCE_SERVICE, POD, Kind, Stage
from skiff_operator.resources import containers, deployment, model_cache_claim
from skiff_operator.resources.metadata import digest, digest_annotation
from skiff_operator.settings import Settings
from skiff_operator.watch_streams import Event, StreamKey
from skiff_operator.workqueue import Key
from skiff_runtime import contract


class StartedPod(NamedTuple):
    """A pod that has become ready for the first time."""

    uid: str
    ip: str
    startup: startup.PodStartup


class ReconcileRequest(NamedTuple):
    """A request to reconcile an InferenceService, with the most urgent stage that the event may have caused.

    `edited`: its spec changed, so its backoff from earlier failures is dropped. `started`: the event shows the end of
    a pod's start.
    """

    key: Key
    stage: Stage
    edited: bool = False
    started: StartedPod | None = None


class Observer:
    """Keeps the cache consistent with the cluster."""

    def __init__(self, cache: Cache, settings: Settings) -> None:
        """Fill `cache`; `settings` decide which namespaces are read and what is desired."""
        self.cache = cache
        self._settings = settings
        self._observed_versions: dict[StreamKey, int] = {}
        self._leftovers: set[str] = set()
        self.overdue: frozenset[str] = frozenset()
        """The uids of the children that the garbage collector should have deleted before the last resync."""

    def observe_list_end(
        self, stream: StreamKey, shown: set[str], resource_version: int
    ) -> list[ReconcileRequest]:
        """Observe the end of a list: forget objects that it lacks, which were deleted while no watch was open.

        Objects newer than the list stay: we wrote them after the list was made.
        """
        self._observed_versions[stream] = resource_version
        gone = [
            record
            for record in self.cache.records(stream.kind)
            if stream.namespace in (None, record.key[0])
            and record.uid not in shown
            and record.version <= resource_version
        ]
        return [self._forget(stream.kind, record) for record in gone]

    def observe_new_owner(self, kind: Kind, obj: dict[str, Any]) -> ReconcileRequest | None:
        """Forget an object under its former InferenceService when it now belongs to another one."""
        home = self.cache.key_of(obj["metadata"]["uid"])
        if kind == INFERENCE_SERVICE or home is None or home == _key(kind, obj):
            return None
        return self._forget(kind, Record(home, obj["metadata"]["name"], obj["metadata"]["uid"]))

    def observe(self, kind: Kind, obj: dict[str, Any], event: Event) -> ReconcileRequest | None:
        """Observe one object of a list or a watch event."""
        meta, key = obj["metadata"], _key(kind, obj)
        if event != "LISTED":
            self._observed_versions[self._stream(kind, key)] = int(meta["resourceVersion"])
        if event == "DELETED":
            if kind != INFERENCE_SERVICE and self.cache.key_of(meta["uid"]) is None:
                return None
            return self._forget(kind, Record(key, meta["name"], meta["uid"]))
        if kind == INFERENCE_SERVICE:
            return self._observe_service(key, obj)
        return self._observe_pod(key, obj) if kind == POD else self._observe_child(kind, key, obj, event)

    def observe_resync(self) -> list[Key]:
        """Observe that a resync begins; return the keys with leftovers that existed at the last one, too.

        The garbage collector deletes children within moments. One that two resyncs have seen has been overlooked.
        """
        leftovers = self.cache.leftovers()
        self.overdue = frozenset(leftovers.keys() & self._leftovers)
        self._leftovers = set(leftovers)
        return sorted({leftovers[uid] for uid in self.overdue})

    def observe_applied(self, kind: Kind, key: Key, obj: dict[str, Any]) -> None:
        """Observe the API server's response to our own apply, which holds the desired state.

        Watch events may overtake the response. It is dropped when the cache holds a newer version, and when the
        watch has gone past its resource version without the object, which was deleted meanwhile.
        """
        meta, entry = obj["metadata"], self.cache.get_or_create(key)
        known = entry.children.get((kind, meta["name"]))
        if known is not None and known.uid == meta["uid"]:
            late = int(meta["resourceVersion"]) < int(known.resource_version)
        else:
            watched = contract.LABEL_SERVICE in (meta.get("labels") or {})
            late = watched and int(meta["resourceVersion"]) <= self._observed_versions.get(
                self._stream(kind, key), 0
            )
        if not late:
            self.cache.put_child(key, kind, meta["name"], _child(obj, key[1], in_sync=True))
            if kind == DEPLOYMENT:
                entry.observe_rollout(workload.read_rollout(obj))
            elif kind == CONTROLLER_REVISION:
                _observe_revision(entry, obj)
        self.cache.remove_if_empty(key)

    def observe_predecessors_child(self, kind: Kind, key: Key, obj: dict[str, Any]) -> None:
        """Observe an object if an earlier InferenceService of this name controls it: its deletion may free a name."""
        entry, name, owner = self.cache.get_or_create(key), obj["metadata"]["name"], ownership.controller(obj)
        earlier = (owner.get("kind"), owner.get("name")) == (INFERENCE_SERVICE.name, key[1])
        if earlier and owner["uid"] != entry.uid and (kind, name) not in entry.children:
            self.cache.put_child(key, kind, name, _child(obj, key[1], in_sync=True))
        self.cache.remove_if_empty(key)

    def observe_deleted(self, kind: Kind, key: Key, name: str, uid: str) -> None:
        """Observe that we deleted a child."""
        self._forget(kind, Record(key, name, uid))

    def observe_status(self, key: Key, obj: dict[str, Any], written: status.Status) -> None:
        """Observe the API server's response to our own status, so that its echo on the watch causes no work."""
        entry, meta = self.cache.get_or_create(key), obj["metadata"]
        if entry.uid != meta["uid"] or not _newer(meta, entry.resource_version):
            return  # the watch has shown this status, or a later one, already
        entry.status = written
        if meta["generation"] == entry.generation:
            entry.resource_version = meta["resourceVersion"]

    def _forget(self, kind: Kind, record: Record) -> ReconcileRequest:
        """Drop a deleted object, unless a newer one of the same name is known."""
        self.cache.drop(kind, record)
        return ReconcileRequest(record.key, Stage.STATUS if kind == POD else Stage.CHILDREN)

    def _stream(self, kind: Kind, key: Key) -> StreamKey:
        """Return the stream that shows the objects of a kind in the namespace of `key`."""
        return StreamKey(kind, self._settings.watch_scope(key[0]))

    def _observe_service(self, key: Key, obj: dict[str, Any]) -> ReconcileRequest | None:
        meta = obj["metadata"]
        entry = self.cache.get_or_create(key)
        if entry.uid == meta["uid"] and not _newer(meta, entry.resource_version):
            return None
        changed = (entry.uid, entry.generation) != (meta["uid"], meta["generation"])
        known = entry.service
        requested = known is not None and (
            spec.requests(obj) != known.requests or spec.promoted_revision(obj) != known.promoted_revision
        )
        if entry.uid != meta["uid"]:
            entry.analysis = entry.scaling = entry.adapters = None
        entry.uid, entry.resource_version = meta["uid"], meta["resourceVersion"]
        entry.deleting = "deletionTimestamp" in meta
        entry.status = status.read(obj.get("status"))
        if not changed and not requested:
            return ReconcileRequest(key, Stage.STATUS)
        entry.generation = meta["generation"]
        _parse_spec(entry, obj)
        self.cache.record_lora(key, entry)
        return ReconcileRequest(key, Stage.CHILDREN, edited=True)

    def _observe_child(
        self, kind: Kind, key: Key, obj: dict[str, Any], event: Event
    ) -> ReconcileRequest | None:
        entry, meta = self.cache.get_or_create(key), obj["metadata"]
        known = entry.children.get((kind, meta["name"]))
        if known is not None and known.uid == meta["uid"] and not _newer(meta, known.resource_version):
            return None
        child = _child(obj, key[1], in_sync=True)
        rollout_before = entry.rollout
        if entry.present and child.owner != entry.uid and (known is None or known.uid != child.uid):
            self.observe_predecessors_child(kind, key, obj)
            return None  # not ours, although it carries our label
        if kind == DEPLOYMENT and meta["name"] == key[1]:
            entry.observe_rollout(workload.read_rollout(obj))
            if event == "LISTED":
                self._read_model_cache(entry, obj)
        if event != "ADDED" and (known is None or _moved(kind, known, child)):
            child = msgspec.structs.replace(child, in_sync=self._is_in_sync(kind, key, obj, event))
        self.cache.put_child(key, kind, meta["name"], child)
        same = known is not None and (known.digest, known.in_sync, child.in_sync) == (
            child.digest,
            True,
            True,
        )
        if kind == CONTROLLER_REVISION and _observe_revision(entry, obj):
            return ReconcileRequest(key, Stage.CHILDREN)
        if same and entry.rollout == rollout_before:
            return None
        return ReconcileRequest(key, Stage.STATUS if child.in_sync else Stage.CHILDREN)

    def _read_model_cache(self, entry: Entry, deployment: dict[str, Any]) -> None:
        """Keep the ModelCache that pods mount already, after a start of the operator: another choice restarts them."""
        undecided = entry.service is not None and entry.service.model_cache is None
        if self._settings.model_caches and undecided:
            entry.use_model_cache(model_cache_claim.mounted_cache(deployment))

    def _observe_pod(self, key: Key, obj: dict[str, Any]) -> ReconcileRequest | None:
        if not workload.runs_in(obj, key[1]):
            return None
        entry, name = self.cache.get_or_create(key), obj["metadata"]["name"]
        gpu = containers.gpu_resource(entry.service, self._settings) if entry.service else ""
        state = workload.read_pod(obj, gpu_resource=gpu or self._settings.gpu_resource_name)
        known = entry.pods.get(name)
        if known is not None and known.uid != state.uid:
            known = None
        recorded = known.startup if known else None
        begun = (known is not None and known.begun) or not startup.has_started(obj)
        started = None
        if known is not None and begun and recorded is None and state.ready:
            recorded = startup.read(obj)
            if recorded is not None:
                started = StartedPod(state.uid, obj["status"].get("podIP", ""), recorded)
        state = msgspec.structs.replace(state, startup=recorded, begun=begun)
        if known == state:
            return None
        self.cache.put_pod(key, state)
        return ReconcileRequest(key, Stage.STATUS, started=started)

    def observe_startup(self, key: Key, uid: str, completed: startup.PodStartup) -> ReconcileRequest | None:
        """Observe the server's report of a pod's start; None when the pod is gone."""
        entry = self.cache.get(key)
        pod = entry.pods.get(completed.pod) if entry else None
        if pod is None or pod.uid != uid or pod.terminating:
            return None
        self.cache.put_pod(key, msgspec.structs.replace(pod, startup=completed))
        return ReconcileRequest(key, Stage.STATUS)

    def _is_in_sync(self, kind: Kind, key: Key, obj: dict[str, Any], event: Event) -> bool:
        """Return True when a live child matches its desired state, or none is desired."""
        entry = self.cache.get_or_create(key)
        if entry.service is None or entry.invalid is not None:
            return True
        try:
            manifests = entry.manifests or plan.objects(entry.service, self._settings)
        except InvalidSpec:
            return True
        if event == "LISTED" and entry.manifests is None:  # each kind's list needs it again
            entry.manifests = manifests
        desired = manifests.get((kind, obj["metadata"]["name"]))
        if kind == DEPLOYMENT and desired is not None and _revision(desired) != _revision(obj):
            return False  # it may have the template of an older revision, with which the applier compares it
        if kind == DEPLOYMENT and desired is not None:
            policy = entry.service.spec.rollout
            held = policy.canary is not None and entry.rollout is not None and entry.rollout.held
            desired = deployment.with_strategy(desired, policy, entry.choice, held=held)
        return desired is None or covers(desired, obj)


def _key(kind: Kind, obj: dict[str, Any]) -> Key:
    """Return the key of an InferenceService, or of the one that owns the object: by controller, for a pod by label.

    The controller comes first, so that a child whose label was edited is repaired, not attributed to another service.
    """
    meta = obj["metadata"]
    if kind == INFERENCE_SERVICE:
        return meta["namespace"], meta["name"]
    for owner in meta.get("ownerReferences") or []:
        if owner.get("controller") and owner["kind"] == INFERENCE_SERVICE.name:
            return meta["namespace"], owner["name"]
    return meta["namespace"], meta["labels"][contract.LABEL_SERVICE]


def _parse_spec(entry: Entry, obj: dict[str, Any]) -> None:
    """Parse a new generation. When it is invalid, the last valid one stays in force and the error is reported."""
    entry.desired = entry.manifests = entry.problem = entry.invalid = None
    previous = entry.service
    try:
        entry.service = spec.parse(obj)
        if previous is not None and spec.has_same_source(previous.spec, entry.service.spec):
            entry.service = msgspec.structs.replace(entry.service, model_cache=previous.model_cache)
    except InvalidSpec as error:
        entry.invalid = error


def _child(obj: dict[str, Any], service: str, *, in_sync: bool) -> Child:
    meta = obj["metadata"]
    owners = meta.get("ownerReferences") or []
    return Child(
        uid=meta["uid"],
        resource_version=meta["resourceVersion"],
        generation=meta.get("generation", 0),
        digest=digest_annotation(obj),
        metadata_digest=digest([meta.get("labels"), owners]),
        owner=ownership.controller_uid(obj),
        in_sync=in_sync,
        sole_owner=bool(ownership.sole_owner_uid(obj, service=service)),
    )


def _observe_revision(entry: Entry, obj: dict[str, Any]) -> bool:
    """Record a ControllerRevision; return whether the choice among them must be made anew."""
    record = revisions.read(obj)
    if entry.revisions.get(record.name) == record:
        return False
    entry.revisions[record.name] = record
    entry.desired = None
    return True


def _revision(deployment: dict[str, Any]) -> str:
    return workload.read_rollout(deployment).revision


def _moved(kind: Kind, known: Child, child: Child) -> bool:
    """Return True when fields that we own may have changed.

    The generation counts changes of the spec alone, and for some kinds not even those: then objects are compared.
    """
    if not known.in_sync or known.metadata_digest != child.metadata_digest or not kind.versioned_spec:
        return True
    return known.generation != child.generation


def _newer(meta: dict[str, Any], known_version: str) -> bool:
    """Return True when an object is newer than the cached one; responses to our writes may overtake events."""
    return int(meta["resourceVersion"]) > int(known_version)
