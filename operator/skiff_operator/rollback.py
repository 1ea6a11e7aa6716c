"""Automatic rollback: the decision that a revision has failed while an older one served. Pure: the time is an argument.

A revision has failed when the Deployment's progress deadline is over, when its pods have been in trouble for a while, or
when they serve worse than the older one's (`rollout_analysis`). One crash is no failure: a server may start again after
an outage of the hub, and a Secret may arrive late.
"""

from typing import Final

from skiff_operator.cache import Entry
from skiff_operator.resources import deployment
from skiff_operator.revisions import Target
from skiff_operator.rollout_analysis import Verdict
from skiff_operator.status import DEGRADED, PROGRESSING, ROLLED_BACK, Problem, Status
from skiff_operator.timestamps import seconds_between

_FAILURES: Final = frozenset(
    {"CrashLoop", "OutOfMemory", "ContainerConfigError", "ImagePullFailed", "WeightsDownloadFailed"}
)
"""Troubles of pods that the revision causes. A lack of GPUs is none, because the old revision needs as many."""
_REASON_CHARACTERS: Final = 512


def reason(
    entry: Entry, target: Target | None, now: str, after_seconds: float, worse: Verdict | None = None
) -> str:
    """Return the reason why the revision in force must be rolled back at `now`; empty when it must not.

    A failure must have lasted `after_seconds`, which the last written status shows. `worse`: it serves worse than the one
    before it.
    """
    service, status = entry.service, entry.status
    if service is None or status is None or target is None or target.failed:
        return ""
    policy = service.spec.rollout
    if not policy.rolls_back or policy.paused or service.spec.replicas == 0:
        return ""
    if worse is not None:
        return _shortened(f"{worse.reason}: {worse.message}")
    if status.current_revision in ("", target.revision) or not _has(entry, status.current_revision):
        return ""
    if entry.rollout is not None and entry.rollout.stalled:
        return _shortened(f"ProgressDeadlineExceeded: {entry.rollout.stalled}")
    if entry.desired is not None and entry.desired.held:
        deadline = deployment.progress_deadline_seconds(service)
        if _wait_seconds(status, target, entry, now) > deadline:
            return f"ProgressDeadlineExceeded: no pod of the canary was ready within {deadline} s"
    degraded = status.condition(DEGRADED)
    if degraded is None or degraded.status != "True" or degraded.reason not in _FAILURES:
        return ""
    pods = [pod for pod in entry.pods.values() if pod.revision == target.revision and not pod.terminating]
    lasted = seconds_between(degraded.last_transition_time, now)
    if lasted < after_seconds or any(pod.ready for pod in pods):
        return ""
    failing = sorted((pod.name, pod) for pod in pods if pod.trouble in _FAILURES)
    return _shortened(f"{failing[0][1].trouble}: {failing[0][1].message}") if failing else ""


def problem(name: str, target: Target) -> Problem:
    """Return what the status reports after a rollback: the reason, and the way out."""
    way_out = f"change the spec, or try it again with `skiff rollout restart {name}`"
    message = f"revision {target.revision} failed: {target.failed}; revision {target.deployed} replaces it; {way_out}"
    return Problem(ROLLED_BACK, message)


def _wait_seconds(status: Status, target: Target, entry: Entry, now: str) -> float:
    """Return for how long a canary has had no ready pod since its rollout began; 0 once it has one.

    The deadline of its Deployment cannot show this: what is held makes no progress.
    """
    progressing = status.condition(PROGRESSING)
    if progressing is None or progressing.status != "True" or status.update_revision != target.revision:
        return 0.0
    if any(pod.ready for pod in entry.pods.values() if pod.revision == target.revision):
        return 0.0
    return seconds_between(progressing.last_transition_time, now)


def _has(entry: Entry, revision: str) -> bool:
    """Return whether there is a sound revision to return to."""
    return any(each.revision == revision and not each.failed for each in entry.own_revisions())


def _shortened(text: str) -> str:
    return text[:_REASON_CHARACTERS]
