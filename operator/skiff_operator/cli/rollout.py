"""Manage the rollouts of an InferenceService."""

import argparse
import datetime
import json
import re
import time
from collections.abc import Callable
from typing import Any, Final

from skiff_operator import ownership, revisions, spec
from skiff_operator.cli import cluster
from skiff_operator.cli.cluster import Cluster
from skiff_operator.errors import OperatorError
from skiff_operator.kinds import CONTROLLER_REVISION, INFERENCE_SERVICE
from skiff_operator.revisions import Revision
from skiff_operator.status import CANARY
from skiff_runtime import contract

_POLL_SECONDS: Final = 1.0
_UNITS: Final = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|)")

Action = Callable[[Cluster, argparse.Namespace], int]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand for each action."""
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    status = _add_action(actions, "status", "wait for the rollout, and show its progress", _status)
    status.add_argument(
        "-w",
        "--watch",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait for its end (default)",
    )
    status.add_argument(
        "--timeout",
        type=_seconds,
        default=0.0,
        metavar="10m",
        help="give up after this time (default: never)",
    )
    status.add_argument(
        "--revision", type=int, default=0, metavar="N", help="fail if another revision comes into force"
    )
    history = _add_action(actions, "history", "list the revisions, or show one", _history)
    history.add_argument(
        "--revision", type=int, default=0, metavar="N", help="show the spec and the template of this one"
    )
    undo = _add_action(actions, "undo", "return to the spec of an earlier revision", _undo)
    undo.add_argument(
        "--to-revision",
        type=int,
        default=0,
        metavar="N",
        help="the revision (default: the one before the present one)",
    )
    _add_action(actions, "promote", "end the canary, and let its revision replace the old one", _promote)
    _add_action(actions, "pause", "replace no pods until `resume`", _pause)
    _add_action(actions, "resume", "replace pods again", _resume)
    _add_action(actions, "restart", "replace all pods by new ones of the same template", _restart)
    _add_action(
        actions, "upgrade", "adopt the pod template and the image of the installed operator", _upgrade
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the action of the command line."""
    action: Action = arguments.action
    with cluster.connected(arguments) as connected:
        return action(connected, arguments)


def _add_action(
    actions: "argparse._SubParsersAction[Any]", name: str, summary: str, action: Action
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=summary, description=f"{summary}.".capitalize()
    )
    parser.add_argument("name", metavar="NAME", help="the InferenceService")
    parser.set_defaults(action=action)
    cluster.add_arguments(parser)
    return parser


def _seconds(text: str) -> float:
    """Parse a duration as kubectl does: 90s, 10m, 1h30m; a bare number is seconds."""
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration, such as 90s or 10m")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def _status(connected: Cluster, arguments: argparse.Namespace) -> int:
    """Print each change of the progress until the rollout has ended."""
    deadline = time.monotonic() + arguments.timeout if arguments.timeout else None
    shown = ""
    while True:
        service = connected.service(arguments.name)
        if arguments.revision and (number := _in_force(connected, service).number) != arguments.revision:
            raise OperatorError(f"revision {arguments.revision} is not in force: revision {number} is")
        progress, ended = _progress(service, _revisions(connected, service))
        if progress != shown:
            print(progress, flush=True)
            shown = progress
        if ended or not arguments.watch:
            return 0
        if deadline is not None and time.monotonic() > deadline:
            raise OperatorError("timed out waiting for the rollout")
        time.sleep(_POLL_SECONDS)


def _progress(service: dict[str, Any], known: tuple[Revision, ...]) -> tuple[str, bool]:
    """Return a line about the rollout, and True if it has ended.

    Raises:
        OperatorError: it has failed.
    """
    name, status = service["metadata"]["name"], service.get("status", {})
    last = revisions.newest(known)
    handled = last is not None and (last.restarted_at, last.upgraded_at) == spec.requests(service)
    if status.get("observedGeneration", 0) < service["metadata"]["generation"] or not handled:
        return "Waiting for the operator to observe the spec...", False
    conditions = {each["type"]: each for each in status["conditions"]}
    progressing, ready = conditions["Progressing"], conditions["Ready"]
    if status["updateRevision"] != last.revision:  # type: ignore[union-attr]  # `handled` says that there is one
        return "Waiting for the operator to observe the spec...", False
    if progressing["reason"] == CANARY:
        return f"Waiting for the canary: {progressing['message']}{_figures(service)}", False
    if progressing["status"] == "True" or progressing["reason"] == "RolloutPaused":
        return f"Waiting for the rollout to finish: {_message(progressing, ready)}", False
    if progressing["reason"] != "RolloutComplete":
        raise OperatorError(f"{name}: {progressing['reason']}: {progressing['message']}")
    return f'inferenceservice "{name}" successfully rolled out', True


def _figures(service: dict[str, Any]) -> str:
    """Return how much a canary has proved so far; empty where nothing is compared."""
    analysis = service["status"].get("analysis")
    if analysis is None:
        return ""
    counts = [
        f"{each.get('failedRequests', 0)} of {each.get('requests', 0)} requests failed"
        for each in (analysis["candidate"], analysis["baseline"])
    ]
    needed = spec.parse(service).spec.rollout.analysis.min_requests
    return f" ({counts[0]}, with the old revision {counts[1]}; {needed} are needed)"


def _message(progressing: dict[str, Any], ready: dict[str, Any]) -> str:
    return (
        progressing["message"] if ready["reason"] == "Serving" else f"{ready['reason']}: {ready['message']}"
    )


def _history(connected: Cluster, arguments: argparse.Namespace) -> int:
    """Print a line for each revision, or with `--revision` the spec and the template of one."""
    service = connected.service(arguments.name)
    if arguments.revision:
        data = connected.get(CONTROLLER_REVISION, _numbered(connected, service, arguments.revision).name)[
            "data"
        ]
        print(json.dumps(data, indent=2, ensure_ascii=False))
        return 0
    table = [("REVISION", "NAME", "PODS", "OPERATOR", "STATE", "CHANGE-CAUSE")]
    for each in sorted(_revisions(connected, service), key=lambda each: each.number):
        state = f"failed: {each.failed.partition(':')[0]}" if each.failed else ""
        table.append(
            (
                str(each.number),
                each.name,
                each.revision,
                each.operator_version,
                state or "<none>",
                each.cause or "<none>",
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        print("   ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _promote(connected: Cluster, arguments: argparse.Namespace) -> int:
    """Request that the canary becomes an ordinary rollout."""
    service = connected.service(arguments.name)
    canary = service.get("status", {}).get("canary")
    if canary is None:
        raise OperatorError(f"{arguments.name} has no canary")
    return _change(connected, service, _promotion(canary["revision"]), "promoted")


def _promotion(revision: str) -> dict[str, Any]:
    """Return the patch by which a revision is no canary."""
    return {"metadata": {"annotations": {spec.ANNOTATION_PROMOTED_REVISION: revision}}}


def _undo(connected: Cluster, arguments: argparse.Namespace) -> int:
    """Write the spec of an earlier revision, with the present fields that change no pod. It is no canary."""
    service = connected.service(arguments.name)
    present = _in_force(connected, service)
    if arguments.to_revision:
        chosen = _numbered(connected, service, arguments.to_revision)
    else:
        older = [each for each in _revisions(connected, service) if each.spec_hash != present.spec_hash]
        earlier = revisions.newest(tuple(each for each in older if not each.failed))
        if earlier is None:
            raise OperatorError(f"{arguments.name} has no earlier revision with another spec")
        chosen = earlier
    name = service["metadata"]["name"]
    if chosen.spec_hash == present.spec_hash:
        print(f"inferenceservice/{name} skipped rollback (its spec is that of revision {chosen.number})")
        return 0
    old: dict[str, Any] = connected.get(CONTROLLER_REVISION, chosen.name)["data"]["spec"]
    spec_now = service["spec"]
    kept = {each: spec_now[each] for each in revisions.NOT_OF_PODS if each in spec_now}
    if "size" in spec_now.get("cache", {}) and "size" in old.get("cache", {}):
        kept["cache"] = spec_now["cache"]  # a claim cannot shrink
    if spec_now.get("rollout", {}).get("canary") is not None:
        connected.merge(INFERENCE_SERVICE, name, _promotion(chosen.revision))
    connected.replace_spec(INFERENCE_SERVICE, service, {**old, **kept})
    print(f"inferenceservice/{name} rolled back to revision {chosen.number}")
    return 0


def _pause(connected: Cluster, arguments: argparse.Namespace) -> int:
    return _set_paused(connected, arguments.name, paused=True)


def _resume(connected: Cluster, arguments: argparse.Namespace) -> int:
    return _set_paused(connected, arguments.name, paused=False)


def _set_paused(connected: Cluster, name: str, *, paused: bool) -> int:
    service = connected.service(name)
    done = "paused" if paused else "resumed"
    if service["spec"].get("rollout", {}).get("paused", False) == paused:
        raise OperatorError(f"{name} is {'already paused' if paused else 'not paused'}")
    return _change(connected, service, {"spec": {"rollout": {"paused": paused}}}, done)


def _restart(connected: Cluster, arguments: argparse.Namespace) -> int:
    service = connected.service(arguments.name)
    if service["spec"].get("rollout", {}).get("paused", False):
        raise OperatorError(f"{arguments.name} is paused; run `resume` first")
    return _request(connected, service, spec.ANNOTATION_RESTARTED_AT, "restarted")


def _upgrade(connected: Cluster, arguments: argparse.Namespace) -> int:
    return _request(connected, connected.service(arguments.name), spec.ANNOTATION_UPGRADED_AT, "upgraded")


def _request(connected: Cluster, service: dict[str, Any], annotation: str, done: str) -> int:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return _change(connected, service, {"metadata": {"annotations": {annotation: now}}}, done)


def _change(connected: Cluster, service: dict[str, Any], patch: dict[str, Any], done: str) -> int:
    name = service["metadata"]["name"]
    connected.merge(INFERENCE_SERVICE, name, patch)
    print(f"inferenceservice/{name} {done}")
    return 0


def _revisions(connected: Cluster, service: dict[str, Any]) -> tuple[Revision, ...]:
    """Return the revisions of an InferenceService."""
    meta = service["metadata"]
    found = connected.list(CONTROLLER_REVISION, selector=f"{contract.LABEL_SERVICE}={meta['name']}")
    return tuple(revisions.read(each) for each in found if ownership.controller_uid(each) == meta["uid"])


def _in_force(connected: Cluster, service: dict[str, Any]) -> Revision:
    found = revisions.newest(_revisions(connected, service))
    if found is None:
        raise OperatorError(f"{service['metadata']['name']} has no revision yet; see its conditions")
    return found


def _numbered(connected: Cluster, service: dict[str, Any], number: int) -> Revision:
    known = _revisions(connected, service)
    for each in known:
        if each.number == number:
            return each
    numbers = ", ".join(str(each.number) for each in sorted(known, key=lambda each: each.number))
    raise OperatorError(f"there is no revision {number}; there are: {numbers or 'none'}")
