"""The only writer of the cluster: server-side apply, prune, status and Events."""

import datetime
from typing import Any

import msgspec

from skiff_operator import events, plan
from skiff_operator.cache import Entry, Objects
from skiff_operator.client import Client
from skiff_operator.errors import ApiConflict, ApiNotFound, OperatorError, Permanent
from skiff_operator.kinds import EVENT, INFERENCE_SERVICE
from skiff_operator.log import logger
from skiff_operator.observe import Observer
from skiff_operator.status import Status
from skiff_operator.workqueue import Key


class NameTaken(Permanent):
    """Another object, which is not ours, has the name that a child needs."""

    reason = "NameConflict"


class Applier:
    """Carries out steps and tells the observer what came of them, so that no echo needs to be awaited."""

    def __init__(self, client: Client, observer: Observer, *, reporter: str) -> None:
        """Write through `client`; `reporter` names this process in Events."""
        self._client = client
        self._observer = observer
        self._reporter = reporter

    async def run(self, key: Key, steps: list[plan.Step], objects: Objects) -> None:
        """Take the steps in their order.

        Raises:
            NameTaken: an object of someone else is in the way.
            ApiRefused, ApiUnavailable: the API server's answer to the first step that failed.
        """
        for step in steps:
            if step.action == "delete":
                await self._client.delete(step.kind, key[0], step.name, uid=step.uid)
                self._observer.deleted(step.kind, key, step.name, step.uid)
            else:
                live = await self._apply(key, step, objects[(step.kind, step.name)])
                self._observer.applied(step.kind, key, live)

    async def write_status(self, key: Key, entry: Entry, status: Status) -> None:
        """Write the status if it differs from the last one, and tell of the transitions in it."""
        if status == entry.status:
            return
        body = {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.name,
            "metadata": {"name": key[1], "uid": entry.uid},
            "status": msgspec.to_builtins(status),
        }
        previous, uid = entry.status, entry.uid
        try:
            live = await self._client.apply(
                INFERENCE_SERVICE, key[0], key[1], body, force=True, subresource="status"
            )
        except (ApiNotFound, ApiConflict):
            return  # deleted, or deleted and made again; its event is on the way
        self._observer.reported(key, live, status)
        for news in events.announcements(previous, status):
            await self._announce(key, uid, news)

    async def _apply(self, key: Key, step: plan.Step, obj: dict[str, Any]) -> dict[str, Any]:
        try:
            return await self._client.apply(step.kind, key[0], step.name, obj, force=step.ours)
        except ApiConflict as error:
            raise NameTaken(
                f"{step.kind.name} {step.name} exists and is not this InferenceService's; "
                f"delete it or rename the InferenceService ({error})"
            ) from error

    async def _announce(self, key: Key, uid: str, news: events.Announcement) -> None:
        namespace, name = key
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        body = events.build(news, namespace=namespace, name=name, uid=uid, reporter=self._reporter, now=now)
        try:
            await self._client.create(EVENT, namespace, body)
        except OperatorError as error:
            logger.warning("event not posted", extra={"object": f"{namespace}/{name}", "error": str(error)})


def clock() -> str:
    """The time as conditions write it."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
