"""The cache of the observed cluster state: a few small records for each InferenceService, never whole objects.

Only `observe` writes to it; planning and status read it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from skiff_operator.errors import InvalidSpec
from skiff_operator.kinds import CONTROLLER_REVISION, DEPLOYMENT, INFERENCE_SERVICE, POD, Kind
from skiff_operator.revisions import Observed, Revision, Target
from skiff_operator.rollout_analysis import Analysis
from skiff_operator.rollout_strategy import Choice
from skiff_operator.spec import InferenceService, MountedCache
from skiff_operator.status import AdapterStatus, Problem, Scaling, Status
from skiff_operator.workload import PodState, Rollout
from skiff_operator.workqueue import Key

Objects = dict[tuple[Kind, str], dict[str, Any]]
"""Built objects by kind and name, in the order of creation."""


class Child(msgspec.Struct, frozen=True, gc=False):
    """One object that an InferenceService owns.

    `digest`: the desired-state hash in its annotation; `metadata_digest`: a hash of its labels and owner references;
    `in_sync`: it matched the desired state when last compared; `owner`: uid of its controller. `sole_owner`: the
    controller is an InferenceService of this name and its only owner, with which it is garbage-collected.
    """

    uid: str
    resource_version: str
    generation: int
    digest: str
    metadata_digest: str
    owner: str
    in_sync: bool
    sole_owner: bool = False


class Record(NamedTuple):
    """One cached object of any kind; `version` is its resource version, and 0 for a pod."""

    key: Key
    name: str
    uid: str
    version: int = 0


class DesiredState(msgspec.Struct, frozen=True):
    """The desired state of one generation: the hash of each child, the pods' revision, and the children that pods mount.

    The hash of a Deployment stands for its template by the template's revision, which `target` chose. `held`: the new pods
    are a canary.
    """

    digests: dict[tuple[Kind, str], str]
    revision: str
    used: frozenset[tuple[Kind, str]] = frozenset()
    target: Target | None = None
    held: bool = False

    @property
    def deployed(self) -> str:
        """The revision of the template that the Deployment gets: an older one than `revision` after a rollback."""
        return self.revision if self.target is None else self.target.deployed


class Entry(msgspec.Struct):
    """The observed state of one InferenceService and of the objects with its label.

    `service` is None while the object is absent or its spec was never valid; then `invalid` may hold the error.
    `desired` is derived from `service` on first use; `manifests` holds the built objects while some are missing.
    `problem` is the last refusal of the API server. `decision` is the strategy that was chosen for the rollout to the
    desired revision; after a restart, the Deployment's own record of it counts. `analysis`: comparison of its
    rollout, for the next status. `scaling`: last autoscaling change. `adapters`: LoRA adapters as last observed.
    `restarts`: container restarts that this process observed.
    """

    service: InferenceService | None = None
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deleting: bool = False
    invalid: InvalidSpec | None = None
    status: Status | None = None
    desired: DesiredState | None = None
    manifests: Objects | None = None
    problem: Problem | None = None
    children: dict[tuple[Kind, str], Child] = msgspec.field(default_factory=dict)
    rollout: Rollout | None = None
    revisions: dict[str, Revision] = msgspec.field(default_factory=dict)
    decision: Choice | None = None
    pods: dict[str, PodState] = msgspec.field(default_factory=dict)
    analysis: Analysis | None = None
    scaling: Scaling | None = None
    adapters: tuple[AdapterStatus, ...] | None = None
    restarts: int = 0

    @property
    def choice(self) -> Choice | None:
        """The chosen rollout strategy, and the revision to which it applies."""
        if self.decision is not None or self.rollout is None:
            return self.decision
        return Choice(self.rollout.revision, self.rollout.replace_reason)

    @property
    def last_analysis(self) -> Analysis | None:
        """The analysis of the last rollout, by this process or by the one before it."""
        written = self.status.analysis if self.status is not None else None
        return self.analysis or written

    @property
    def autoscaled(self) -> bool:
        """True when the operator decides the number of pods; not while the spec is invalid."""
        service = self.service
        return (
            service is not None
            and service.spec.autoscaling is not None
            and service.spec.autoscaling.engine == "Builtin"
            and self.present
            and not self.deleting
            and self.invalid is None
        )

    @property
    def last_scaling(self) -> Scaling | None:
        """The last change of the number of pods by autoscaling, by this process or by the one before it."""
        if self.service is None or self.service.spec.autoscaling is None:
            return None
        written = self.status.autoscaling if self.status is not None else None
        return self.scaling or written

    @property
    def last_adapters(self) -> tuple[AdapterStatus, ...]:
        """The LoRA adapters as this process observed them last, or the one before it; none without LoRA."""
        if self.service is None or self.service.spec.lora is None:
            return ()
        if self.adapters is not None:
            return self.adapters
        return self.status.adapters if self.status is not None else ()

    @property
    def analyzed_baseline(self) -> str:
        """The revision to which the rollout that is being analyzed may have to return; empty without one."""
        analysis = self.last_analysis
        return analysis.baseline.revision if analysis is not None and analysis.active else ""

    @property
    def present(self) -> bool:
        """True when the InferenceService itself exists."""
        return bool(self.uid)

    def owns(self, kind: Kind, name: str) -> bool:
        """Return whether a child exists whose controller is this InferenceService."""
        child = self.children.get((kind, name))
        return child is not None and child.owner == self.uid

    def leftovers(self) -> list[tuple[Kind, str, Child]]:
        """Return the children of an earlier InferenceService of this name that are to be garbage-collected."""
        return [
            (kind, name, child)
            for (kind, name), child in self.children.items()
            if child.owner != self.uid and child.sole_owner
        ]

    def observed(self, name: str) -> Observed:
        """Collect the inputs of the choice of a revision."""
        rollout = self.rollout if self.owns(DEPLOYMENT, name) else None
        status = self.status
        settled = status is not None and status.observed_generation == self.generation
        return Observed(
            revisions=self.own_revisions(),
            live_revision=rollout.revision if rollout else "",
            live_spec_hash=rollout.spec_hash if rollout else "",
            settled_revision=status.update_revision if status is not None and settled else "",
            current_revision=status.current_revision if status is not None else "",
            baseline_revision=self.last_analysis.baseline.revision if self.last_analysis else "",
        )

    def own_revisions(self) -> tuple[Revision, ...]:
        """Return the revisions that this InferenceService owns."""
        return tuple(each for each in self.revisions.values() if self.owns(CONTROLLER_REVISION, each.name))

    def observe_rollout(self, rollout: Rollout) -> None:
        """Store the Deployment's progress; another recorded choice changes the desired state.

        A decision ends with its rollout: the Deployment has the record of it, and a later rollout decides anew.
        """
        before = self.choice
        self.rollout = rollout
        if rollout.complete and self.decision == Choice(rollout.revision, rollout.replace_reason):
            self.decision = None
        after = self.choice
        if before != after and any(choice and choice.replace_reason for choice in (before, after)):
            self.desired = None

    def decide(self, choice: Choice) -> None:
        """Choose the strategy of the rollout to the desired revision, which changes the desired state."""
        self.decision = choice
        self.desired = None

    def use_model_cache(self, chosen: MountedCache) -> None:
        """Let the pods mount a ModelCache, or none; what was built without it is dropped."""
        assert self.service is not None, "only a valid service has a choice"
        self.service = msgspec.structs.replace(self.service, model_cache=chosen)
        self.desired = self.manifests = None

    def shares_claim_of(self, model_cache: str) -> bool:
        """Return whether a pod, or the Deployment that makes pods, mounts the shared claim of a ModelCache."""
        rollout = self.rollout is not None and self.rollout.model_cache == model_cache
        return rollout or any(pod.model_cache == model_cache for pod in self.pods.values())

    def clear(self) -> None:
        """Forget the InferenceService itself; its children may still exist."""
        self.service = self.status = self.desired = self.manifests = self.problem = self.invalid = None
        self.analysis = self.scaling = self.adapters = None
        self.uid, self.deleting, self.decision = "", False, None

    @property
    def empty(self) -> bool:
        """True when nothing is known."""
        return not (self.uid or self.children or self.pods or self.rollout)


class Cache:
    """Entries by namespace and name."""

    def __init__(self) -> None:
        """Create an empty cache."""
        self._entries: dict[Key, Entry] = {}
        self._keys_by_uid: dict[str, Key] = {}
        self.lora: set[Key] = set()
        """The keys of the InferenceServices that serve LoRA adapters."""

    def __iter__(self) -> Iterator[Key]:
        """Iterate over the keys of all InferenceServices that exist."""
        return iter([key for key, entry in self._entries.items() if entry.present])

    def entries(self) -> Iterator[Entry]:
        """Iterate over the entries of all InferenceServices that exist."""
        return iter([entry for entry in self._entries.values() if entry.present])

    def is_claim_shared(self, model_cache: str) -> bool:
        """Return whether anything mounts the shared claim of a ModelCache, also what a deleted InferenceService left."""
        return any(entry.shares_claim_of(model_cache) for entry in self._entries.values())

    def leftovers(self) -> dict[str, Key]:
        """Return the keys of all children that have outlived their InferenceServices, by the uids of these children."""
        items = self._entries.items()
        return {child.uid: key for key, entry in items for _, _, child in entry.leftovers()}

    def get(self, key: Key) -> Entry | None:
        """Return the entry of `key`, if there is one."""
        return self._entries.get(key)

    def get_or_create(self, key: Key) -> Entry:
        """Return the entry of `key`, created when there is none."""
        return self._entries.setdefault(key, Entry())

    def record_lora(self, key: Key, entry: Entry) -> None:
        """Record whether an InferenceService, whose spec was parsed, serves LoRA adapters."""
        if entry.service is not None and entry.service.spec.lora is not None:
            self.lora.add(key)
        else:
            self.lora.discard(key)

    def key_of(self, uid: str) -> Key | None:
        """Return the key of the InferenceService under which a child or a pod is cached."""
        return self._keys_by_uid.get(uid)

    def put_child(self, key: Key, kind: Kind, name: str, child: Child) -> None:
        """Store a child, replacing one of the same name."""
        children = self.get_or_create(key).children
        if (kind, name) in children:
            self._keys_by_uid.pop(children[(kind, name)].uid, None)
        children[(kind, name)] = child
        self._keys_by_uid[child.uid] = key

    def put_pod(self, key: Key, pod: PodState) -> None:
        """Store a pod, replacing one of the same name."""
        entry = self.get_or_create(key)
        pods, known = entry.pods, entry.pods.get(pod.name)
        if known is not None:
            self._keys_by_uid.pop(known.uid, None)
            if known.uid == pod.uid:
                entry.restarts += max(0, pod.restarts - known.restarts)
        pods[pod.name] = pod
        self._keys_by_uid[pod.uid] = key

    def drop(self, kind: Kind, record: Record) -> None:
        """Remove one object, unless another one has its name by now."""
        key, name, uid, _ = record
        entry = self.get_or_create(key)
        if kind == INFERENCE_SERVICE:
            if entry.uid == uid:
                entry.clear()
                self.lora.discard(key)
        elif kind == POD:
            if name in entry.pods and entry.pods[name].uid == uid:
                del entry.pods[name]
        elif (kind, name) in entry.children and entry.children[(kind, name)].uid == uid:
            del entry.children[(kind, name)]
            if kind == DEPLOYMENT and name == key[1]:
                entry.rollout = None
            if kind == CONTROLLER_REVISION:
                entry.revisions.pop(name, None)
                entry.desired = None
        if self._keys_by_uid.get(uid) == key:
            del self._keys_by_uid[uid]
        self.remove_if_empty(key)

    def records(self, kind: Kind) -> list[Record]:
        """Return all cached objects of one kind."""
        entries = self._entries.items()
        if kind == INFERENCE_SERVICE:
            return [Record(key, key[1], e.uid, int(e.resource_version)) for key, e in entries if e.present]
        if kind == POD:
            return [Record(key, pod.name, pod.uid) for key, e in entries for pod in e.pods.values()]
        children = [(key, child_key, child) for key, e in entries for child_key, child in e.children.items()]
        return [
            Record(key, name, child.uid, int(child.resource_version))
            for key, (of, name), child in children
            if of == kind
        ]

    def remove_if_empty(self, key: Key) -> None:
        """Remove the entry of `key` when it is empty."""
        entry = self._entries.get(key)
        if entry is not None and entry.empty:
            del self._entries[key]
