"""The applier, the only writer to the cluster: creations, server-side apply, deletions, status and Events.

Every write identifies one object. A creation is a POST, which never changes an existing object; a change and a
deletion carry the uid and the resourceVersion at which the object was last read and found to be ours.
"""

import contextlib
import datetime
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from skiff_operator import events, ownership, plan
from skiff_operator.cache import Child, DesiredState, Entry, Objects
from skiff_operator.client import MERGE_PATCH, Client, Propagation
from skiff_operator.drift import covers
from skiff_operator.errors import (
    ApiAlreadyExists,
    ApiBusy,
    ApiConflict,
    ApiNotFound,
    ApiUnavailable,
    OperatorError,
)
from skiff_operator.kinds import CONTROLLER_REVISION, DEPLOYMENT, EVENT, INFERENCE_SERVICE, Kind
from skiff_operator.log import logger
from skiff_operator.observe import Observer
from skiff_operator.resources.metadata import FIELD_MANAGER
from skiff_operator.status import Status
from skiff_operator.workqueue import Key

T = TypeVar("T")

_ATTEMPTS: Final = 3
"""Reads of one object in one reconcile; a write by others, such as of a Deployment's status, makes a read stale."""


class Failure(NamedTuple):
    """A failed step and its error."""

    step: plan.Step
    error: OperatorError


class Goal(NamedTuple):
    """The desired children of the InferenceService of this uid."""

    uid: str
    desired: DesiredState
    objects: Objects


class Applier:
    """Executes steps and passes the responses to the observer, so that no watch event needs to be awaited."""

    def __init__(self, client: Client, observer: Observer, *, reporter: str) -> None:
        """Write through `client`; `reporter` names this process in Events."""
        self._client = client
        self._observer = observer
        self._reporter = reporter

    async def run(self, key: Key, entry: Entry, steps: list[plan.Step], goal: Goal) -> list[Failure]:
        """Execute the steps in order; after a failure, go on with the steps that do not depend on it.

        Raises:
            ApiUnavailable: the API server cannot be reached.
        """
        failures = []
        for step in steps:
            if plan.is_blocked(entry, goal.desired, step):
                continue  # a step that it depends on has failed
            try:
                if step.action == "delete":
                    await self._delete(key, goal.uid, step)
                else:
                    obj = goal.objects[(step.kind, step.name)]
                    live = await self._write(key, goal.uid, step, obj)
                    self._observer.observe_applied(step.kind, key, live)
            except OperatorError as error:
                if isinstance(error, ApiUnavailable) and not isinstance(error, ApiBusy):
                    raise
                failures.append(Failure(step, error))
        return failures

    async def write_status(self, key: Key, entry: Entry, status: Status) -> None:
        """Write the status if it differs from the last one, and send Events for its transitions."""
        if status == entry.status:
            return
        body = {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.name,
            # The API server ignores the uid in a status write, so only the version protects a successor of the same name.
            "metadata": {"name": key[1], "uid": entry.uid, "resourceVersion": entry.resource_version},
            "status": msgspec.to_builtins(status),
        }
        previous, uid = entry.status, entry.uid
        try:
            live = await self._client.apply(INFERENCE_SERVICE, key[0], key[1], body, subresource="status")
        except (ApiNotFound, ApiConflict):
            return  # changed, deleted, or deleted and made again; its event is on the way
        self._observer.observe_status(key, live, status)
        for news in events.announcements(previous, status):
            await self.announce(key, uid, news)

    async def _write(self, key: Key, uid: str, step: plan.Step, obj: dict[str, Any]) -> dict[str, Any]:
        """Create or update a child of the InferenceService `uid`; return the child as stored."""
        ownership.require_free(step.kind, step.name)
        if step.action == "create":
            try:
                return await self._client.create(step.kind, key[0], obj)
            except ApiAlreadyExists:
                pass  # It is ours if the response to an earlier creation was lost, or its label was removed.
        if step.kind == CONTROLLER_REVISION:
            return await self._relabel(key, uid, step, obj)
        try:
            return await _on_current(lambda: self._change(key, uid, step.kind, obj))
        except ApiNotFound as error:
            self._observer.observe_deleted(step.kind, key, step.name, step.uid)
            raise ApiConflict(f"{step.kind.name} {step.name} was deleted meanwhile") from error

    async def _change(self, key: Key, uid: str, kind: Kind, obj: dict[str, Any]) -> dict[str, Any]:
        """Read a child and apply to exactly the version that was read."""
        namespaced_name = key[0], obj["metadata"]["name"]
        live = await self._read_child(key, uid, kind, namespaced_name[1])
        if kind == DEPLOYMENT and covers(obj, live):
            return live  # the observer cannot compare the template of an older revision, which it would have to read
        fields = ownership.migrated_fields(live)
        if fields is not None:
            version = live["metadata"]["resourceVersion"]
            patch = {"/metadata/managedFields": fields}
            live = await self._client.edit(kind, *namespaced_name, patch, version=version)
        guard = {name: live["metadata"][name] for name in ("uid", "resourceVersion")}
        return await self._client.apply(
            kind, *namespaced_name, {**obj, "metadata": {**obj["metadata"], **guard}}
        )

    async def _read_child(self, key: Key, uid: str, kind: Kind, name: str) -> dict[str, Any]:
        """Read the object that has the name of a child; raise `NameTaken` if it is not ours."""
        live = await self._client.get(kind, key[0], name)
        self._observer.observe_predecessors_child(kind, key, live)
        ownership.require_owned(kind, live, service=key[1], uid=uid)
        return live

    async def _relabel(self, key: Key, uid: str, step: plan.Step, obj: dict[str, Any]) -> dict[str, Any]:
        """Restore the labels and the annotations of an existing ControllerRevision, whose data cannot change."""
        live = await self._read_child(key, uid, step.kind, step.name)
        restored = {name: obj["metadata"][name] for name in ("labels", "annotations")}
        return await self._merge(
            key, step.kind, step.name, {"metadata": restored}, uid=live["metadata"]["uid"]
        )

    async def change_revision(self, key: Key, name: str, uid: str, patch: dict[str, Any]) -> None:
        """Merge `patch` into the ControllerRevision of this uid.

        Raises:
            ApiConflict: it was deleted meanwhile.
        """
        try:
            live = await self._merge(key, CONTROLLER_REVISION, name, patch, uid=uid)
        except ApiNotFound as error:
            self._observer.observe_deleted(CONTROLLER_REVISION, key, name, uid)
            raise ApiConflict(f"ControllerRevision {name} was deleted meanwhile") from error
        self._observer.observe_applied(CONTROLLER_REVISION, key, live)

    async def _merge(
        self, key: Key, kind: Kind, name: str, patch: dict[str, Any], *, uid: str
    ) -> dict[str, Any]:
        """Send a JSON merge patch to the object of this uid; another one of the name is a conflict."""
        guarded = {**patch, "metadata": {**patch["metadata"], "uid": uid}}
        query = {"fieldManager": FIELD_MANAGER}
        path = kind.path(key[0], name)
        return await self._client.request("PATCH", path, guarded, query=query, content_type=MERGE_PATCH)

    async def read(self, key: Key, kind: Kind, name: str) -> dict[str, Any]:
        """Read an object that the cache knows, such as the data of a ControllerRevision.

        Raises:
            ApiConflict: it was deleted meanwhile.
        """
        try:
            return await self._client.get(kind, key[0], name)
        except ApiNotFound as error:
            raise ApiConflict(f"{kind.name} {name} was deleted meanwhile") from error

    async def _delete(self, key: Key, uid: str, step: plan.Step) -> None:
        """Delete a child of the InferenceService `uid`, unless it is gone or no longer ours."""
        with contextlib.suppress(ApiNotFound):
            await _on_current(lambda: self._delete_once(key, uid, step))
        self._observer.observe_deleted(step.kind, key, step.name, step.uid)

    async def _delete_once(self, key: Key, uid: str, step: plan.Step) -> None:
        live = await self._client.get(step.kind, key[0], step.name)
        meta = live["metadata"]
        ours = (meta["uid"], ownership.controller_uid(live)) == (step.uid, uid)
        if ours and "deletionTimestamp" not in meta:
            version = meta["resourceVersion"]
            await self._client.delete(step.kind, key[0], step.name, uid=step.uid, version=version)

    async def delete_leftovers(self, key: Key, leftovers: list[tuple[Kind, str, Child]]) -> None:
        """Delete children whose InferenceService does not exist any more; a failure waits for the next resync."""
        existing = await self._existing_uids(key)
        for kind, name, child in leftovers:
            if child.owner in existing:
                continue
            try:
                await _on_current(partial(self._delete_leftover, key, kind, name, child))
            except ApiNotFound:
                self._observer.observe_deleted(kind, key, name, child.uid)
            except OperatorError as error:
                extra = {"object": "/".join(key), "child": f"{kind.name} {name}", "error": str(error)}
                logger.warning("leftover not deleted yet", extra=extra)

    async def _delete_leftover(self, key: Key, kind: Kind, name: str, child: Child) -> None:
        """Delete a child at the version that was read, if it is still a leftover.

        The watch reports the end of the deletion: the name may be taken until no pod needs the object.
        """
        live = await self._client.get(kind, key[0], name)
        meta = live["metadata"]
        if meta["uid"] == child.uid and "deletionTimestamp" in meta:
            return
        if (meta["uid"], ownership.sole_owner_uid(live, service=key[1])) != (child.uid, child.owner):
            self._observer.observe_deleted(kind, key, name, child.uid)
            return
        # In the foreground, a Deployment stays until its ReplicaSets and pods are gone. If it were replaced at once, the
        # garbage collector could overlook that, too, and the pods would run for ever.
        policy: Propagation = "Foreground" if kind == DEPLOYMENT else "Background"
        version = meta["resourceVersion"]
        await self._client.delete(kind, key[0], name, uid=child.uid, version=version, propagation=policy)
        extra = {"object": "/".join(key), "child": f"{kind.name} {name}"}
        logger.info("deleted a child of an earlier InferenceService", extra=extra)

    async def _existing_uids(self, key: Key) -> set[str]:
        """Return the uid of the InferenceService of this name, as a set that is empty when there is none.

        A list is read from the API server's storage, and unlike a read by name it fails when the kind is not served,
        which proves nothing.
        """
        found = self._client.list(INFERENCE_SERVICE, key[0], selector="", fields=f"metadata.name={key[1]}")
        return {each["metadata"]["uid"] async for each in found}

    async def announce(self, key: Key, uid: str, news: events.Announcement) -> None:
        """Send an Event about the InferenceService `uid`; a failure is only logged."""
        namespace, name = key
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = events.build(news, namespace=namespace, name=name, uid=uid, reporter=self._reporter, now=now)
        try:
            await self._client.create(EVENT, namespace, body)
        except OperatorError as error:
            logger.warning("event not posted", extra={"object": f"{namespace}/{name}", "error": str(error)})


async def _on_current(write: Callable[[], Awaitable[T]]) -> T:
    """Read and write an object; read it again when another writer came in between.

    Raises:
        ApiConflict: every attempt met another write.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(ApiConflict):
            return await write()
    return await write()


def clock() -> str:
    """Return the current time in the format of conditions."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
