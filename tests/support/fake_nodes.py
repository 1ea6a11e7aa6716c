"""Nodes without machines, by kwok: a scheduler that places pods, and kwok, which plays the kubelet of every node."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from apiserver import ApiServer

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

from controlplane import ControlPlane
from daemons import Daemon
from paths import layout
from toolchain import SCHEDULER, ensure, kwok

REQUESTS_PER_SECOND: Final = 1_000
"""Limit of each client of the control plane; their defaults of 20 to 50 would take an hour for thousands of objects."""
MANAGER_FLAGS: Final = (
    f"--kube-api-qps={REQUESTS_PER_SECOND}",
    f"--kube-api-burst={REQUESTS_PER_SECOND}",
    "--node-monitor-grace-period=1h",
)
STAGES: Final = ("node/fast/node-initialize", *(f"pod/fast/pod-{each}" for each in ("ready", "delete")))
CAPACITY: Final = {"cpu": "1000", "memory": "4Ti", "ephemeral-storage": "4Ti", "pods": "1000"}


class FakeNodes:
    """A scheduler and kwok beside a control plane; they end with it or with `stop`."""

    def __init__(self, plane: ControlPlane, count: int) -> None:
        self._plane, self._count = plane, count
        self._daemons: list[Daemon] = []

    def __enter__(self) -> FakeNodes:
        ensure([SCHEDULER], layout())
        program, module = kwok(layout())
        folder = self._plane.directory / "run"
        scheduler = folder / "scheduler.yaml"
        scheduler.write_text(json.dumps(self._scheduler_configuration()))
        stages = [module / "kustomize/stage" / f"{each}.yaml" for each in STAGES]
        self._start(
            "kube-scheduler",
            layout().bin / SCHEDULER.name,
            f"--config={scheduler}",
            "--secure-port=0",
        )
        self._start(
            "kwok",
            program,
            f"--kubeconfig={self._plane.kubeconfig}",
            "--manage-all-nodes",
            *(f"--config={each}" for each in stages),
        )
        api = ApiServer(self._plane.kubeconfig)
        for number in range(self._count):
            api.request("POST", "/api/v1/nodes", _node(f"fake-{number}"))
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in self._daemons:
            daemon.stop()

    def require(self) -> None:
        """Raise ClusterError when the scheduler or kwok has ended."""
        for daemon in self._daemons:
            daemon.require()

    def _start(self, name: str, *words: str | Path) -> None:
        daemon = Daemon(name, self._plane.directory / "run")
        daemon.start(list(words), with_parent=True)
        self._daemons.append(daemon)

    def _scheduler_configuration(self) -> dict[str, Any]:
        connection = {
            "kubeconfig": str(self._plane.kubeconfig),
            "qps": REQUESTS_PER_SECOND,
            "burst": REQUESTS_PER_SECOND,
        }
        return {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": connection,
            "leaderElection": {"leaderElect": False},
        }


def _node(name: str) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {"capacity": CAPACITY, "allocatable": CAPACITY},
    }
