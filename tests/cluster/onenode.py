"""The one-node Kubernetes: real components, built from Go modules, inside the namespaces of node.py."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import archive
import debian
import images
import nodeconfig
import volumes
from apiclient import ApiClient
from builders import Buildah
from commands import ClusterError, output, run, say, scratch, step, succeeds, wait_for
from controlplane import (
    apiserver_arguments,
    await_default_account,
    await_ready,
    etcd_arguments,
    manager_arguments,
)
from daemons import Daemon
from node import NODE_ADDRESS, NODE_NAME, Node
from nodeconfig import ENDPOINT
from paths import Layout
from pki import Authority
from toolchain import CONTROL_PLANE, NODE, ensure

DAEMONS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "containerd",
    "kubelet",
    "kube-proxy",
    "coredns",
)
NODE_READY_SECONDS = 120


@dataclass(frozen=True)
class OneNode:
    """A cluster provider: the cluster whose files lie under `layout`."""

    layout: Layout
    name = "one-node"

    @property
    def node(self) -> Node:
        """The namespaces that it runs in."""
        return Node(self.layout.state, self.layout.images / "node")

    @property
    def deliveries(self) -> Path:
        """Directory of the records of the node's images, beside its image store, which outlives the cluster."""
        return self.layout.images / "delivered"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig; its server is reachable from the machine and from pods."""
        return self.layout.kubeconfig

    def client(self) -> ApiClient:
        """Return a client with the administrator's certificate."""
        return ApiClient(Authority(self.layout.state / "pki"), NODE_ADDRESS, ENDPOINT.api_port)

    def daemon(self, name: str) -> Daemon:
        """Return one of DAEMONS."""
        return Daemon(name, self.layout.state / "run")

    def healthy(self) -> bool:
        """Say whether everything runs, the API server answers and the node is Ready."""
        if self.node.pid is None or not all(self.daemon(name).alive() for name in DAEMONS):
            return False
        client = self.client()
        return client.answers("/readyz") and node_ready(client)

    def up(self) -> None:
        """Build what is missing, clear what is half dead, start everything and wait until it is ready for pods."""
        if self.healthy():
            volumes.recycle(self.client(), self.layout.state / "volumes")
            say("the cluster is up already")
            return
        if os.geteuid() != 0:
            raise ClusterError(f"A Kubernetes node of our own needs root.\n{debian.ALTERNATIVES}")
        debian.ensure({**debian.NODE_PACKAGES, **debian.IMAGE_PACKAGES}, self.layout)
        ensure([*CONTROL_PLANE, *NODE], self.layout)
        images.ensure_pause(self.layout, Buildah(self.layout))
        self.down()
        try:
            self._start()
        except BaseException:
            self.node.destroy()
            raise

    def _start(self) -> None:
        state = self.layout.state
        with step("making keys and the node's namespaces"):
            (state / "run").mkdir(parents=True)
            self.layout.provider.write_text(self.name)
            authority = nodeconfig.write(self.layout, runc=self._installed("runc"))
            self.node.create()
        with step("starting the control plane"):
            self._start_control_plane(authority)
        with step("starting the node"):
            self._start_node()

    def _run(self, name: str, *arguments: str | Path, program: Path | None = None) -> Daemon:
        daemon = self.daemon(name)
        daemon.start([*self.node.enter(), program or self.layout.bin / name, *arguments])
        return daemon

    def _start_control_plane(self, authority: Authority) -> None:
        state, scratch = self.layout.state, self.layout.state / "run"
        etcd = self._run("etcd", *etcd_arguments(ENDPOINT, state / "etcd"))
        server = self._run(
            "kube-apiserver",
            *apiserver_arguments(ENDPOINT, authority, scratch),
            "--bind-address=0.0.0.0",
            f"--advertise-address={NODE_ADDRESS}",
            f"--kubelet-client-certificate={authority.path('kubelet-client', 'crt')}",
            f"--kubelet-client-key={authority.path('kubelet-client', 'key')}",
            f"--kubelet-certificate-authority={authority.certificate}",
            "--kubelet-preferred-address-types=InternalIP,Hostname",
        )
        self._run(
            "containerd",
            "--config",
            state / "conf" / "containerd.toml",
            program=self._installed("containerd"),
        )
        await_ready(self.client(), [etcd, server])
        manager = state / "conf" / "controller-manager.kubeconfig"
        self._run("kube-controller-manager", *manager_arguments(ENDPOINT, authority, manager, scratch))
        scheduler = state / "conf" / "kube-scheduler.kubeconfig"
        kubeconfigs = [f"--{use}kubeconfig={scheduler}" for use in ("", "authentication-", "authorization-")]
        self._run(
            "kube-scheduler",
            *kubeconfigs,
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            f"--cert-dir={scratch}",
        )

    def _start_node(self) -> None:
        conf = self.layout.state / "conf"
        containerd = self.daemon("containerd")

        def serves() -> bool:
            containerd.require()
            return succeeds([*self.node.enter(), "ctr", "version"])

        wait_for("containerd", serves, timeout_seconds=30)
        self.load(images.PAUSE)
        volumes.make_folders(self.layout.state / "volumes")
        kubelet = self._run(
            "kubelet",
            f"--config={conf / 'kubelet.yaml'}",
            f"--kubeconfig={conf / 'node.kubeconfig'}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={NODE_ADDRESS}",
        )
        self._run("coredns", "-conf", conf / "Corefile")
        self._run("kube-proxy", f"--config={conf / 'kube-proxy.yaml'}")
        client = self.client()
        volumes.create(client)

        def ready() -> bool:
            kubelet.require()
            return node_ready(client)

        wait_for("a Ready node", ready, timeout_seconds=NODE_READY_SECONDS, interval_seconds=0.2)
        await_default_account(client)

    def _installed(self, program: str) -> Path:
        found = shutil.which(program, path=debian.search_path())
        if found is None:
            raise ClusterError(f"{program} is missing")
        return Path(found)

    def down(self) -> None:
        """End everything and remove the state; fine when nothing is there."""
        if not self.layout.state.exists():
            return
        with step("taking the cluster down"):
            self.node.destroy()
            for name in DAEMONS:
                self.daemon(name).stop(grace_seconds=0)
            shutil.rmtree(self.layout.state)

    @property
    def _ctr(self) -> list[str]:
        return [*self.node.enter(), "ctr", "-n", "k8s.io"]

    def forget(self, image: str, identity: str | None) -> None:
        """Remove an image's name from the node, and its id, under which the kubelet's interface holds it, if given.

        Containers that run from it keep its layers.
        """
        names = [image, *([f"sha256:{identity}"] if identity else [])]
        succeeds([*self._ctr, "images", "rm", *names])

    def tag(self, image: str, name: str) -> None:
        """Give an image that the node holds another name as well."""
        output([*self._ctr, "images", "tag", "--force", image, name])

    def load(self, image: str) -> None:
        """Copy an image from Buildah's store into the node, sending only the layers that it does not hold yet."""
        log = self.layout.logs / "import.log"
        with scratch(self.layout.images) as folder:
            Buildah(self.layout).copy_to_folder(image, folder / "image", log)
            held = set(output([*self._ctr, "content", "ls", "-q"]).split())
            archive.pack(folder / "image", image, folder / "image.tar", held=held)
            run([*self._ctr, "images", "import", str(folder / "image.tar")], log=log, timeout_seconds=600)


def node_ready(client: ApiClient) -> bool:
    """Say whether the node's Ready condition is true now."""
    path = f"/api/v1/nodes/{NODE_NAME}"
    if not client.answers(path):
        return False
    conditions = client.get(path)["status"].get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
