"""Explain in one screen why an InferenceService is not Ready, and what to do.

It reads the status, the pods, the events and the end of the log of the pod that blocks, and for pods that wait for a GPU
the nodes. It needs the rights of Kubernetes' role view; nodes and the pods of other namespaces, which that role does not
include, are left out where they may not be read. Secrets in messages and logs are masked.
"""

import argparse
import contextlib
import datetime
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from skiff_operator import spec, workload
from skiff_operator import status as status_of
from skiff_operator.cli import capacity, cluster, installation, table
from skiff_operator.cli.capacity import NodeRoom
from skiff_operator.cli.cluster import Cluster
from skiff_operator.errors import InvalidSpec, OperatorError
from skiff_operator.failure import REMEDIES
from skiff_operator.kinds import EVENT, POD
from skiff_operator.redact import redact
from skiff_operator.resources import containers
from skiff_operator.rollout_analysis import OBSERVING
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService
from skiff_operator.startup import PodStartup
from skiff_operator.status import DEGRADED, PROGRESSING, READY, Problem, Status
from skiff_operator.workload import PodState
from skiff_runtime import contract

EVENTS: Final = 6
LOG_LINES: Final = 12
PODS: Final = 8
ADAPTERS: Final = 8
NODES: Final = 6
_LOG_BYTES: Final = 16_384
_EVENT_LIMIT: Final = 200

_WAITING: Final = {
    "Scheduling": "Wait: the Kubernetes scheduler places the pod.",
    "Creating": "Wait: the node mounts the volumes and pulls the image.",
    "Fetching": "Wait: the weights are being downloaded; `kubectl logs {pod} -c fetch` shows the progress.",
    "Loading": "Wait: the server loads the model.",
    "Serving": "Wait: the pods answer, and the rollout goes on.",
}
"""Advice for each phase of a pod that is starting."""
_CLASSIFIED: Final = ("CrashLoop", "WeightsDownloadFailed", "OutOfMemory")
"""Reasons of conditions for which `lastFailure` has a more precise remedy."""


@dataclass(frozen=True, kw_only=True)
class Pod:
    """The part of a pod that an explanation uses. `age_seconds`: since its creation."""

    state: PodState
    node: str
    age_seconds: float
    restarts: int


@dataclass(frozen=True, kw_only=True)
class Event:
    """One Kubernetes Event about the InferenceService or its blocking pod."""

    type: str
    reason: str
    note: str
    count: int
    age_seconds: float


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The inputs of an explanation, read at one moment.

    `service` is None while the spec is invalid. `log` is the end of the output of `container` of the blocking pod.
    `nodes` is None where they are not known, or do not matter.
    """

    namespace: str
    name: str
    generation: int
    service: InferenceService | None
    status: Status | None
    pods: tuple[Pod, ...] = ()
    events: tuple[Event, ...] = ()
    container: str = ""
    log: tuple[str, ...] = ()
    gpu_resource: str = ""
    nodes: tuple[NodeRoom, ...] | None = None
    needs_gpus: bool = False

    @property
    def blocking(self) -> Pod | None:
        """The pod that keeps the service from being Ready, of the desired revision first; None if all are ready."""
        return _blocking(self.pods, self.status)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("name", metavar="NAME", help="the InferenceService")
    cluster.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the explanation; the exit code is 0 whether or not the service is Ready."""
    with cluster.connected(arguments) as connected:
        snapshot = gather(connected, arguments.name)
    print(render(snapshot, width=min(shutil.get_terminal_size((100, 24)).columns, 120)))
    return 0


def gather(connected: Cluster, name: str) -> Snapshot:
    """Read the inputs of an explanation. Raises `OperatorError` if the InferenceService or its pods cannot be read."""
    obj, now = connected.service(name), datetime.datetime.now(datetime.UTC)
    meta, status, service = obj["metadata"], status_of.read(obj.get("status")), None
    with contextlib.suppress(InvalidSpec):  # the operator's condition has the reason
        service = spec.parse(obj)
    found = connected.list(POD, selector=f"{contract.LABEL_SERVICE}={meta['name']}")
    owned = [pod for pod in found if workload.runs_in(pod, meta["name"])]
    gpu = _gpu_resource(service, owned)
    pods = tuple(sorted((_pod(each, gpu, now) for each in owned), key=lambda pod: pod.state.name))
    blocking = _blocking(pods, status)
    raw = next((each for each in owned if blocking and each["metadata"]["name"] == blocking.state.name), None)
    container, log = _read_log(connected, raw, blocking)
    waits = blocking is not None and blocking.state.phase == "Scheduling"
    needs = service is not None and containers.gpus(service) > 0
    nodes = None
    if waits and needs and raw is not None:
        nodes = connected.run(capacity.gather(connected.client, raw["spec"]))
    about = [meta["name"], *([blocking.state.name] if blocking else [])]
    return Snapshot(
        namespace=connected.namespace,
        name=meta["name"],
        generation=meta["generation"],
        service=service,
        status=status,
        pods=pods,
        events=_read_events(connected, about, now),
        container=container,
        log=log,
        gpu_resource=gpu,
        nodes=nodes,
        needs_gpus=waits and needs,
    )


def render(snapshot: Snapshot, *, width: int) -> str:
    """Return the explanation, with lines of at most `width` characters where words allow it."""
    sections = [
        _headline(snapshot),
        *_conditions(snapshot, width),
        *_analysis(snapshot),
        *_adapters(snapshot),
        *_pods(snapshot),
        *_events(snapshot, width),
        *_log(snapshot, width),
        *_nodes(snapshot),
        *_startup(snapshot),
    ]
    advice = textwrap.fill(advise(snapshot), width, initial_indent="  ", subsequent_indent="  ")
    return "\n\n".join([*sections, f"What to do\n{advice}"])


def advise(snapshot: Snapshot) -> str:
    """Return the advice to the user: the field to change, or the event to wait for."""
    status, blocking = snapshot.status, snapshot.blocking
    if status is None:
        return "Check that the operator runs and watches this namespace: `kubectl get pods -A -l app.kubernetes.io/name=skiff-operator`."
    if status.observed_generation < snapshot.generation:
        return "Wait: the operator has not seen this spec yet. If this stays, check that it runs."
    trouble = _trouble(status)
    if trouble is not None:
        failure = status.last_failure
        if trouble.reason in _CLASSIFIED and failure is not None and failure.remedy:
            return failure.remedy
        return REMEDIES.get(trouble.reason, "See the message above, and `kubectl describe pod` of the pod.")
    ready, progressing = status.condition(READY), status.condition(PROGRESSING)
    if progressing is not None and progressing.reason == "RolloutPaused":
        return f"The rollout is paused; `kubectl skiff rollout resume {snapshot.name}` continues it."
    settled = progressing is None or progressing.status == "False"
    if ready is not None and ready.status == "True" and settled:
        return "Nothing: all is well."
    if blocking is None:
        return "Wait: pods are about to be created or to stop."
    return _WAITING.get(blocking.state.phase, "Wait: the pod stops.").format(pod=blocking.state.name) + _pace(
        blocking, status.startup
    )


def _pace(pod: Pod, last: PodStartup | None) -> str:
    """Compare the age of a starting pod with the last start."""
    if last is None or last.ready_seconds is None or pod.state.phase == "Serving":
        return ""
    slow = " That is slow: look at the log." if pod.age_seconds > 3 * last.ready_seconds + 60 else ""
    return f" It began {_duration(pod.age_seconds)} ago; the last start took {_duration(last.ready_seconds)} in all.{slow}"


def _blocking(pods: tuple[Pod, ...], status: Status | None) -> Pod | None:
    revision = status.update_revision if status else ""
    waiting = [pod for pod in pods if not pod.state.ready and not pod.state.terminating]
    # Pods of the desired revision come first, then pods with a trouble, then pods that have not ended.
    order = sorted(
        waiting,
        key=lambda pod: (
            pod.state.revision != revision,
            not pod.state.trouble,
            bool(pod.state.ended),
            pod.state.name,
        ),
    )
    return order[0] if order else None


def _trouble(status: Status) -> Problem | None:
    degraded = status.condition(DEGRADED)
    if degraded is None or degraded.status != "True":
        return None
    return Problem(degraded.reason, degraded.message)


def _headline(snapshot: Snapshot) -> str:
    ready = snapshot.status.condition(READY) if snapshot.status else None
    name = f"{snapshot.namespace}/{snapshot.name}"
    if ready is None:
        return f"{name} is not Ready: no operator has reported on it."
    verdict = "is Ready" if ready.status == "True" else f"is not Ready: {ready.reason}"
    lines = [f"{name} {verdict}, since {ready.last_transition_time}"]
    if snapshot.service is not None:
        parsed = snapshot.service
        gpus = containers.gpus(parsed)
        device = f"{gpus} {snapshot.gpu_resource}" if gpus else "a CPU"
        count = f"{parsed.spec.replicas} replica{'' if parsed.spec.replicas == 1 else 's'}"
        lines.append(f"  {parsed.spec.model.uri}, {count}, each on {device}")
        policy, last = parsed.spec.autoscaling, snapshot.status.autoscaling if snapshot.status else None
        if policy is not None:
            since = f": {last.desired_replicas} since {last.at}, {last.message}" if last is not None else ""
            lines.append(f"  autoscaled from {policy.min_replicas} to {policy.max_replicas}{since}")
    return "\n".join(lines)


def _conditions(snapshot: Snapshot, width: int) -> Iterator[str]:
    if snapshot.status is None:
        return
    lines, said = [], set()
    for condition in snapshot.status.conditions:
        line = f"  {condition.type:<13} {condition.status:<6} {condition.reason}"
        if condition.message not in said:  # three conditions repeat the message of a trouble
            line += f": {redact(condition.message)}"
        said.add(condition.message)
        lines.append(textwrap.fill(line, width, subsequent_indent=" " * 23))
    yield "\n".join(["Conditions", *lines])


def _analysis(snapshot: Snapshot) -> Iterator[str]:
    """Show how the new revision compares with the old one, until a later rollout replaces the comparison."""
    analysis = snapshot.status.analysis if snapshot.status else None
    if analysis is None:
        return
    rows = [
        (
            f"  {figures.revision}",
            age,
            str(figures.requests),
            str(figures.failed_requests),
            *(
                "-" if seconds is None else f"{seconds:g}s"
                for seconds in (figures.ttft_p90_seconds, figures.itl_p90_seconds)
            ),
        )
        for age, figures in (("new", analysis.candidate), ("old", analysis.baseline))
    ]
    until = f", until {analysis.until}" if analysis.phase == OBSERVING else ""
    yield f"Analysis: {analysis.phase}{until}\n" + table.render(
        ("  REVISION", "", "REQUESTS", "FAILED", "TTFT P90", "ITL P90"), rows
    )


def _adapters(snapshot: Snapshot) -> Iterator[str]:
    """Show the LoRA adapters, those that are not ready first, with the reason."""
    adapters = snapshot.status.adapters if snapshot.status else ()
    if not adapters:
        return
    shown = sorted(adapters, key=lambda each: (each.ready, each.name))[:ADAPTERS]
    rows = [
        (
            f"  {each.name}",
            f"LoRAAdapter {each.source}" if each.source else "spec.adapters",
            str(each.loaded_pods),
            each.reason if each.ready else _cut(f"{each.reason}: {redact(each.message)}", 100),
        )
        for each in shown
    ]
    rest = len(adapters) - len(shown)
    yield table.render(("Adapters", "FROM", "PODS", "STATE"), rows) + (f"\n  and {rest} more" if rest else "")


def _pods(snapshot: Snapshot) -> Iterator[str]:
    if not snapshot.pods:
        return
    revision = snapshot.status.update_revision if snapshot.status else ""
    blocking = snapshot.blocking
    shown = sorted(snapshot.pods, key=lambda pod: (pod is not blocking, pod.state.ready, pod.state.name))[
        :PODS
    ]
    rows = [
        (
            f"  {pod.state.name}",
            "Failed" if pod.state.ended else pod.state.phase,
            pod.state.trouble or "-",
            "new" if pod.state.revision == revision else "old",
            str(pod.restarts),
            _duration(pod.age_seconds),
            pod.node or "-",
        )
        for pod in shown
    ]
    head = ("Pods", "PHASE", "TROUBLE", "REVISION", "RESTARTS", "AGE", "NODE")
    rest = len(snapshot.pods) - len(shown)
    yield table.render(head, rows) + (f"\n  and {rest} more" if rest else "")


def _events(snapshot: Snapshot, width: int) -> Iterator[str]:
    if not snapshot.events:
        return
    lines = []
    for event in snapshot.events[-EVENTS:]:
        times = f" ({event.count} times)" if event.count > 1 else ""
        head = f"  {_duration(event.age_seconds):>4} ago  {event.type:<8} {event.reason}{times}: "
        text = _cut(head + redact(event.note), 2 * width)
        lines.append(textwrap.fill(text, width, subsequent_indent=" " * 12))
    yield "\n".join(["Events", *lines])


def _cut(text: str, length: int) -> str:
    """Shorten a text in the middle: its beginning names the subject, and its end often the reason."""
    half = (length - 5) // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"


def _log(snapshot: Snapshot, width: int) -> Iterator[str]:
    blocking = snapshot.blocking
    if not snapshot.log or blocking is None:
        return
    # A key may extend over several lines, so they are redacted as one text.
    lines = redact("\n".join(snapshot.log)).splitlines()[-LOG_LINES:]
    folded = [
        textwrap.fill(_cut(line, 4 * width), width, initial_indent="  ", subsequent_indent="    ")
        for line in lines
    ]
    yield "\n".join([f"End of the log of {snapshot.container} in {blocking.state.name}", *folded])


def _nodes(snapshot: Snapshot) -> Iterator[str]:
    if not snapshot.needs_gpus:
        return
    if snapshot.nodes is None:
        yield "Nodes\n  not shown: you may not list nodes"
        return
    resource = snapshot.gpu_resource
    equipped = [room for room in snapshot.nodes if room.total(resource)]
    if not equipped:
        yield f"Nodes\n  no node has any {resource}: does its device plugin run?"
        return
    shown = sorted(equipped, key=lambda room: (not room.admits, -(room.free_devices(resource) or 0)))[:NODES]
    rows = [
        (
            f"  {room.node.name}",
            "not known" if room.free is None else str(room.free_devices(resource)),
            str(room.total(resource)),
            room.gpu_product(resource) or "-",
            "" if room.admits else "cordoned, not ready, or excluded by labels or taints",
        )
        for room in shown
    ]
    rest = len(equipped) - len(shown)
    text = table.render(("Nodes", "FREE", resource, "GPU", ""), rows)
    yield text + (f"\n  and {rest} more" if rest else "")


def _startup(snapshot: Snapshot) -> Iterator[str]:
    last = snapshot.status.startup if snapshot.status else None
    if last is None:
        return
    steps = [f"{step} {_duration(seconds)}" for step, seconds in last.seconds().items()]
    yield f"Last start ({last.pod})\n  {', '.join(steps)}"


def _gpu_resource(service: InferenceService | None, pods: list[dict[str, Any]]) -> str:
    """Return the extended resource of the GPUs; if nothing shows it, the operator's default."""
    specs = (pod["spec"] for pod in pods)
    shown = installation.shown_gpu_resource(service, specs) if service is not None else ""
    return shown or Settings().gpu_resource_name


def _pod(pod: dict[str, Any], gpu_resource: str, now: datetime.datetime) -> Pod:
    status = pod.get("status") or {}
    every = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return Pod(
        state=workload.read_pod(pod, gpu_resource=gpu_resource),
        node=(pod.get("spec") or {}).get("nodeName", ""),
        age_seconds=_age(pod["metadata"]["creationTimestamp"], now),
        restarts=sum(each.get("restartCount", 0) for each in every),
    )


def _read_log(
    connected: Cluster, pod: dict[str, Any] | None, blocking: Pod | None
) -> tuple[str, tuple[str, ...]]:
    """Return the container that keeps the pod from being ready, and the end of its log.

    If the user may not read logs, the end is the one in the pod's status.
    """
    if pod is None or blocking is None:
        return "", ()
    chosen = _talking_container(pod.get("status") or {})
    if chosen is None:
        return "", ()
    name, previous = chosen
    query = {"container": name, "tailLines": str(LOG_LINES), "limitBytes": str(_LOG_BYTES)}
    path = POD.path(connected.namespace, pod["metadata"]["name"], "log")
    text = ""
    with contextlib.suppress(OperatorError):  # a missing right, or a node that does not answer
        text = connected.text(path, **query, **({"previous": "true"} if previous else {}))
    if not text and blocking.state.crash is not None:
        text = blocking.state.crash.log_tail
    return name, tuple(line for line in text.splitlines() if line.strip())


def _talking_container(status: dict[str, Any]) -> tuple[str, bool] | None:
    """Return the container that has not succeeded, and True if its previous run has the reason; None if none has run."""
    for each in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        state = each.get("state") or {}
        ended = state.get("terminated")
        if ended is not None and ended.get("exitCode") == 0:
            continue
        if "running" in state or ended is not None:
            return each["name"], False
        if (each.get("lastState") or {}).get("terminated"):
            return each["name"], True
    return None


def _read_events(connected: Cluster, names: list[str], now: datetime.datetime) -> tuple[Event, ...]:
    """Return the newest events about the objects of these names, oldest first; none if the user may not read them."""
    found = []
    for name in names:
        query = {"fieldSelector": f"regarding.name={name}", "limit": str(_EVENT_LIMIT)}
        try:
            page = connected.run(
                connected.client.request("GET", EVENT.path(connected.namespace), query=query)
            )
        except OperatorError:
            continue
        found += [_event(item, now) for item in page["items"]]
    return tuple(sorted(found, key=lambda event: -event.age_seconds)[-4 * EVENTS :])


def _event(item: dict[str, Any], now: datetime.datetime) -> Event:
    series = item.get("series") or {}
    last = (
        series.get("lastObservedTime")
        or item.get("deprecatedLastTimestamp")
        or item.get("eventTime")
        or item["metadata"]["creationTimestamp"]
    )
    return Event(
        type=item.get("type", ""),
        reason=item.get("reason", ""),
        note=item.get("note", ""),
        count=series.get("count") or item.get("deprecatedCount") or 1,
        age_seconds=_age(last, now),
    )


def _age(since: str, now: datetime.datetime) -> float:
    return max(0.0, (now - datetime.datetime.fromisoformat(since)).total_seconds())


def _duration(seconds: float) -> str:
    """Write a duration as kubectl does, with two units at most."""
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f}s"
    whole = int(seconds)
    if whole < 120:
        return f"{whole}s"
    if whole < 7200:
        return f"{whole // 60}m" + (f"{whole % 60}s" if whole < 600 and whole % 60 else "")
    return f"{whole // 3600}h" if whole < 172_800 else f"{whole // 86_400}d"
