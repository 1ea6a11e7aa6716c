"""The namespaces that play a node, and their network: made, entered, removed without a trace.

A veth pair joins the node's network namespace to the machine's; the machine routes the pods' and the Services' networks through
it. There is no way further out, and the machine's own firewall, kernel settings and mounts stay as they were.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from commands import ClusterError, output, wait_for
from controlplane import SERVICE_NETWORK
from daemons import Daemon
from paths import HERE

LINK = "skiff0"
NODE_NAME = "skiff-node"
NODE_ADDRESS = "10.200.0.2"
HOST_ADDRESS = "10.200.0.1"
LINK_NETWORK = "10.200.0.0/24"
POD_NETWORK = "10.244.0.0/16"
CGROUPS = Path("/sys/fs/cgroup")
CLEANUP_SECONDS = 20


@dataclass(frozen=True)
class Node:
    """The one node whose files lie in `state`; its images lie in `image_store`."""

    state: Path
    image_store: Path

    @property
    def init(self) -> Daemon:
        """The `unshare` process, which lives as long as the namespaces' first process, its only child."""
        return Daemon("init", self.state / "run")

    @property
    def pid(self) -> int | None:
        """The machine's id of the namespaces' first process, or None when there is none."""
        parent = self.init.pid
        if parent is None:
            return None
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return int(children[0]) if children else None

    def enter(self) -> list[str]:
        """Return the words that run a program inside the node when put before it."""
        pid = self.pid
        if pid is None:
            raise ClusterError("the node does not run")
        return ["nsenter", "-t", str(pid), "-m", "-n", "-p"]

    def create(self) -> None:
        """Make the namespaces and their network; raises ClusterError where something else is in the way."""
        self._require_free_machine()
        ready = self.state / "run" / "init.ready"
        ready.unlink(missing_ok=True)
        unshare = ["unshare", "-m", "-n", "-p", "-f", "--propagation", "private", "--mount-proc"]
        init = self.init
        init.start([*unshare, sys.executable, HERE / "node_init.py", self.state, self.image_store])

        def prepared() -> bool:
            init.require()
            return ready.exists()

        wait_for("the node's namespaces", prepared, timeout_seconds=15, interval_seconds=0.02)
        self._connect()

    def _connect(self) -> None:
        pid = self.pid
        _ip("link", "add", LINK, "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        _ip("link", "set", LINK, "alias", str(self.state))
        _ip("address", "add", f"{HOST_ADDRESS}/24", "dev", LINK)
        _ip("link", "set", LINK, "up")
        inside = ["nsenter", "-t", str(pid), "-n"]
        output([*inside, "ip", "address", "add", f"{NODE_ADDRESS}/24", "dev", "eth0"])
        output([*inside, "ip", "link", "set", "eth0", "up"])
        output([*inside, "ip", "route", "add", "default", "via", HOST_ADDRESS])
        for network in (POD_NETWORK, SERVICE_NETWORK):
            _ip("route", "add", network, "via", NODE_ADDRESS)

    def _require_free_machine(self) -> None:
        links = json.loads(output(["ip", "-j", "link", "show"]))
        owner = next((link.get("ifalias", "?") for link in links if link["ifname"] == LINK), None)
        if owner is not None:
            raise ClusterError(
                f"another test cluster runs on this machine: {owner} (set SKIFF_CLUSTER_CACHE to its root to use it)"
            )
        if kubelet_cgroups():
            raise ClusterError(f"another kubelet runs on this machine: {kubelet_cgroups()[0]} exists")
        ours = [ipaddress.ip_network(each) for each in (LINK_NETWORK, POD_NETWORK, SERVICE_NETWORK)]
        for route in json.loads(output(["ip", "-j", "-4", "route", "show"])):
            if route["dst"] == "default":
                continue
            taken = ipaddress.ip_network(route["dst"])
            clash = next((each for each in ours if each.overlaps(taken)), None)
            if clash:
                raise ClusterError(
                    f"the test cluster needs {clash}, but this machine already has a route to {taken}"
                )

    def destroy(self) -> None:
        """Kill the namespaces' first process, and with it all inside; then remove what lies outside of them."""
        pid = self.pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
            wait_for("end of the node", lambda: not self.init.alive(), timeout_seconds=CLEANUP_SECONDS)
        self.init.stop(grace_seconds=0)
        if self._owns_link():
            subprocess.run(["ip", "link", "delete", LINK], capture_output=True, check=False)
        remove_cgroups()

    def _owns_link(self) -> bool:
        # Of all links, because the kernel removes this one with the node's namespaces, at any moment.
        links = json.loads(output(["ip", "-j", "link", "show"]))
        return any(link["ifname"] == LINK and link.get("ifalias") == str(self.state) for link in links)


def _ip(*words: str) -> None:
    output(["ip", *words])


def kubelet_cgroups() -> list[Path]:
    """Return the control groups that a kubelet made: one with cgroup v2, one a controller with v1."""
    return sorted([*CGROUPS.glob("kubepods"), *CGROUPS.glob("*/kubepods")])


def remove_cgroups() -> None:
    """Remove the kubelet's control groups, once the kernel has taken the last dead process out of them."""
    deadline = time.monotonic() + CLEANUP_SECONDS
    while roots := kubelet_cgroups():
        for root in roots:
            for folder, _, _ in os.walk(root, topdown=False):
                with contextlib.suppress(OSError):  # busy for a moment longer
                    Path(folder).rmdir()
        if time.monotonic() > deadline:
            raise ClusterError(f"processes remain in {roots[0]}")
        time.sleep(0.1)
