"""Kubernetes Events for transitions of the status. Pure."""

from collections.abc import Iterator
from typing import Any

import msgspec

from skiff_operator.kinds import EVENT, INFERENCE_SERVICE
from skiff_operator.resources.metadata import FIELD_MANAGER
from skiff_operator.status import ADAPTER_REFUSED, DEGRADED, READY, SERVING, Status


class Announcement(msgspec.Struct, frozen=True):
    """A Kubernetes Event to send: `type` is Normal or Warning."""

    type: str
    reason: str
    note: str


def announcements(previous: Status | None, status: Status) -> Iterator[Announcement]:
    """Return the transitions that merit an Event; none when only counts and messages changed."""
    degraded = status.condition(DEGRADED)
    was_degraded = previous.condition(DEGRADED) if previous else None
    if (
        degraded
        and degraded.status == "True"
        and (not was_degraded or was_degraded.reason != degraded.reason)
    ):
        yield Announcement("Warning", degraded.reason, degraded.message)
    known = {(each.name, each.reason) for each in previous.adapters} if previous else set()
    for each in status.adapters:
        if each.reason == ADAPTER_REFUSED and (each.name, each.reason) not in known:
            yield Announcement("Warning", each.reason, f"adapter {each.name}: {each.message}")
    if _serves(status) and not (previous and _serves(previous)):
        yield Announcement("Normal", "Ready", f"serving at {status.url}")
    if previous and previous.update_revision and previous.update_revision != status.update_revision:
        change = f"from revision {previous.update_revision} to {status.update_revision}"
        yield Announcement("Normal", "RolloutStarted", change)


def _serves(status: Status) -> bool:
    """Return whether the service is Ready with pods; at zero replicas it is Ready without any."""
    ready = status.condition(READY)
    return ready is not None and (ready.status, ready.reason) == ("True", SERVING)


def build(
    news: Announcement, *, namespace: str, name: str, uid: str, reporter: str, now: str
) -> dict[str, Any]:
    """Build the Event object. `now` is RFC 3339 with microseconds, `reporter` the name of this process."""
    return {
        "apiVersion": EVENT.api_version,
        "kind": EVENT.name,
        "metadata": {"generateName": f"{name}-", "namespace": namespace},
        "eventTime": now,
        "type": news.type,
        "reason": news.reason,
        "action": "Reconcile",
        "note": news.note[:1024],
        "reportingController": FIELD_MANAGER,
        "reportingInstance": reporter[:128],
        "regarding": {
            "apiVersion": INFERENCE_SERVICE.api_version,
            "kind": INFERENCE_SERVICE.name,
            "namespace": namespace,
            "name": name,
            "uid": uid,
        },
    }
