"""Kubernetes in Docker, for machines where Docker runs and kind is installed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from commands import ClusterError, output, run, say, step, succeeds
from paths import Layout

CLUSTER = "skiff-test"


def docker_runs() -> bool:
    """Say whether a Docker daemon answers; the client alone does not count."""
    return shutil.which("docker") is not None and succeeds(["docker", "info"])


def usable() -> bool:
    """Say whether kind can make a cluster here."""
    return shutil.which("kind") is not None and docker_runs()


@dataclass(frozen=True)
class Kind:
    """A cluster provider: one kind cluster named CLUSTER."""

    layout: Layout
    name = "kind"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.layout.kubeconfig

    @property
    def deliveries(self) -> Path:
        """Directory of the records of the cluster's images."""
        return self.layout.state / "delivered"

    def healthy(self) -> bool:
        """Say whether the cluster exists and its API server answers."""
        if not self.kubeconfig.exists() or CLUSTER not in output(["kind", "get", "clusters"]).split():
            return False
        kubectl = [
            "docker",
            "exec",
            f"{CLUSTER}-control-plane",
            "kubectl",
            "--kubeconfig=/etc/kubernetes/admin.conf",
        ]
        return succeeds([*kubectl, "get", "--raw", "/readyz"])

    def up(self) -> None:
        """Create the cluster, in place of one that does not answer."""
        if self.healthy():
            say("the cluster is up already")
            return
        self.down()
        self.layout.state.mkdir(parents=True, exist_ok=True)
        self.layout.provider.write_text(self.name)
        with step("creating a kind cluster"):
            where = ["--name", CLUSTER, "--kubeconfig", str(self.kubeconfig)]
            argv = ["kind", "create", "cluster", *where, "--wait", "180s"]
            run(argv, log=self.layout.logs / "kind-create.log", timeout_seconds=900)

    def down(self) -> None:
        """Delete the cluster; fine when there is none."""
        if not self.layout.state.exists():
            return
        with step("deleting the kind cluster"):
            run(
                ["kind", "delete", "cluster", "--name", CLUSTER],
                log=self.layout.logs / "kind-delete.log",
                timeout_seconds=300,
            )
            shutil.rmtree(self.layout.state)

    def load(self, image: str) -> None:
        """Copy an image from Docker's store into the cluster's nodes."""
        if not succeeds(["docker", "image", "inspect", image]):
            raise ClusterError(f"Docker has no image {image}")
        argv = ["kind", "load", "docker-image", "--name", CLUSTER, image]
        run(argv, log=self.layout.logs / "kind-load.log", timeout_seconds=900)

    def forget(self, image: str, identity: str | None) -> None:
        """Remove an image from the cluster's node: all of it if its id is given, unless a container runs from it."""
        if identity:
            succeeds(["docker", "exec", f"{CLUSTER}-control-plane", "crictl", "rmi", image])
