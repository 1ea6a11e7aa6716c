"""Manage the rollouts of an InferenceService."""

import argparse
import re
import time
from collections.abc import Callable
from typing import Any, Final

from skiff_operator.cli import cluster
from skiff_operator.cli.cluster import Cluster
from skiff_operator.errors import OperatorError

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
        progress, ended = _progress(connected.service(arguments.name))
        if progress != shown:
            print(progress, flush=True)
            shown = progress
        if ended or not arguments.watch:
            return 0
        if deadline is not None and time.monotonic() > deadline:
            raise OperatorError("timed out waiting for the rollout")
        time.sleep(_POLL_SECONDS)


def _progress(service: dict[str, Any]) -> tuple[str, bool]:
    """Return a line about the rollout, and whether it has ended.

    Raises:
        OperatorError: it has failed.
    """
    name, status = service["metadata"]["name"], service.get("status", {})
    if status.get("observedGeneration", 0) < service["metadata"]["generation"]:
        return "Waiting for the operator to observe the spec...", False
    conditions = {each["type"]: each for each in status["conditions"]}
    progressing, ready = conditions["Progressing"], conditions["Ready"]
    if progressing["status"] == "False" and progressing["reason"] != "RolloutComplete":
        raise OperatorError(f"{name}: {progressing['reason']}: {progressing['message']}")
    if progressing["status"] == "False":
        return f'inferenceservice "{name}" successfully rolled out', True
    return f"Waiting for the rollout to finish: {ready['message']}", False
