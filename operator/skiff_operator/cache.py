"""What the operator remembers of the cluster: per InferenceService a few small records, never whole objects.

Only `observe` fills it from what the API server said; planning and status read it.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from skiff_operator.errors import InvalidSpec
from skiff_operator.kinds import DEPLOYMENT, INFERENCE_SERVICE, POD, Kind
from skiff_operator.spec import InferenceService
from skiff_operator.status import Problem, Status
from skiff_operator.workload import PodState, Rollout
from skiff_operator.workqueue import Key

Objects = dict[tuple[Kind, str], dict[str, Any]]
"""Built objects by kind and name, in the order of creation."""


class Child(msgspec.Struct, frozen=True, gc=False):
    """One object that an InferenceService owns.

    `digest`: the desired-state hash it carries; `shape`: a hash of its labels and owners; `intact`: it held
    all that was desired when last compared; `owner`: uid of its controller.
    """

    uid: str
    resource_version: str
    generation: int
    digest: str
    shape: str
    owner: str
    intact: bool


class Record(NamedTuple):
    """One remembered object, whatever its kind; `version` is its resource version, and 0 for a pod."""

    key: Key
    name: str
    uid: str
    version: int = 0


class Wanted(msgspec.Struct, frozen=True):
    """The children that one generation of a spec needs: the hash of each child, the pods' revision and what they use."""

    digests: dict[tuple[Kind, str], str]
    revision: str
    used: frozenset[tuple[Kind, str]] = frozenset()


class Entry(msgspec.Struct):
    """All that is known of one InferenceService and of what carries its label.

    `service` is None while the object is absent or its spec was never valid; then `invalid` may say why.
    `wanted` is derived from `service` when first needed; `draft` holds the built objects for as long as some
    are missing. `problem` is what the API server last refused.
    """

    service: InferenceService | None = None
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    deleting: bool = False
    invalid: InvalidSpec | None = None
    status: Status | None = None
    wanted: Wanted | None = None
    draft: Objects | None = None
    problem: Problem | None = None
    children: dict[tuple[Kind, str], Child] = msgspec.field(default_factory=dict)
    rollout: Rollout | None = None
    pods: dict[str, PodState] = msgspec.field(default_factory=dict)

    @property
    def present(self) -> bool:
        """Whether the InferenceService itself exists."""
        return bool(self.uid)

    def leave(self) -> None:
        """Forget the InferenceService itself; its children may still be there."""
        self.service = self.status = self.wanted = self.draft = self.problem = self.invalid = None
        self.uid, self.deleting = "", False

    @property
    def empty(self) -> bool:
        """Whether nothing is left to remember."""
        return not (self.uid or self.children or self.pods or self.rollout)


class Cache:
    """Entries by namespace and name."""

    def __init__(self) -> None:
        """Start with nothing known."""
        self._entries: dict[Key, Entry] = {}
        self._homes: dict[str, Key] = {}

    def __iter__(self) -> Iterator[Key]:
        """Keys of all InferenceServices that exist."""
        return iter([key for key, entry in self._entries.items() if entry.present])

    def entries(self) -> Iterator[Entry]:
        """Entries of all InferenceServices that exist."""
        return iter([entry for entry in self._entries.values() if entry.present])

    def get(self, key: Key) -> Entry | None:
        """What is known of `key`."""
        return self._entries.get(key)

    def touch(self, key: Key) -> Entry:
        """The entry of `key`, made when there is none."""
        return self._entries.setdefault(key, Entry())

    def home(self, uid: str) -> Key | None:
        """The key under which a child or a pod is remembered."""
        return self._homes.get(uid)

    def put_child(self, key: Key, kind: Kind, name: str, child: Child) -> None:
        """Remember a child in place of what had its name."""
        children = self.touch(key).children
        if (kind, name) in children:
            self._homes.pop(children[(kind, name)].uid, None)
        children[(kind, name)] = child
        self._homes[child.uid] = key

    def put_pod(self, key: Key, pod: PodState) -> None:
        """Remember a pod in place of what had its name."""
        pods = self.touch(key).pods
        if pod.name in pods:
            self._homes.pop(pods[pod.name].uid, None)
        pods[pod.name] = pod
        self._homes[pod.uid] = key

    def drop(self, kind: Kind, record: Record) -> None:
        """Forget one object, unless another one has its name by now."""
        key, name, uid, _ = record
        entry = self.touch(key)
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
        if self._homes.get(uid) == key:
            del self._homes[uid]
        self.sweep(key)

    def records(self, kind: Kind) -> list[Record]:
        """All remembered objects of one kind."""
        entries = self._entries.items()
        if kind == INFERENCE_SERVICE:
            return [Record(key, key[1], e.uid, int(e.resource_version)) for key, e in entries if e.present]
        if kind == POD:
            return [Record(key, pod.name, pod.uid) for key, e in entries for pod in e.pods.values()]
        children = [(key, place, child) for key, e in entries for place, child in e.children.items()]
        return [
            Record(key, name, child.uid, int(child.resource_version))
            for key, (of, name), child in children
            if of == kind
        ]

    def sweep(self, key: Key) -> None:
        """Forget `key` when nothing is left of it."""
        entry = self._entries.get(key)
        if entry is not None and entry.empty:
            del self._entries[key]
