"""The control plane that needs no node: from the command line, and two at once from Python."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import toolchain
from commands import output
from controlplane import PROGRAMS, ControlPlane, Endpoint
from daemons import Daemon, start_time
from paths import HERE, layout

pytestmark = pytest.mark.integration


def kubectl(kubeconfig: Path, *words: str) -> str:
    """Run kubectl and return its output."""
    return output([toolchain.kubectl(layout()), "--kubeconfig", kubeconfig, *words])


def cluster(*words: str) -> str:
    """Run tests/cluster/cluster.py and return what it answers."""
    return output([sys.executable, HERE / "cluster.py", *words], timeout_seconds=240)


def test_it_outlives_the_command_and_goes_with_the_next(tmp_path: Path) -> None:
    """While it runs, another one from Python has its own objects; afterwards no process and no file is left."""
    state = tmp_path / "plane"
    kubeconfig = Path(cluster("up", "--control-plane-only", "--state", str(state)))
    try:
        pids = [Daemon(name, state / "run").pid or pytest.fail(name) for name in PROGRAMS]
        kubectl(kubeconfig, "create", "namespace", "first")
        with ControlPlane() as other:
            namespaces = kubectl(other.kubeconfig, "get", "namespaces", "--output", "name")
            assert "namespace/default" in namespaces
            assert "namespace/first" not in namespaces
        assert not other.directory.exists()
        assert "namespace/first" in kubectl(kubeconfig, "get", "namespaces", "--output", "name")
    finally:
        cluster("down", "--control-plane-only", "--state", str(state))
    assert not state.exists()
    assert [start_time(pid) for pid in pids] == [None] * len(PROGRAMS)


def test_no_connection_takes_the_port_of_a_program_that_is_started_again() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    endpoint = Endpoint.on_free_ports()
    ports = [endpoint.api_port, endpoint.etcd_port, endpoint.etcd_peer_port, endpoint.manager_port]
    assert len(set(ports)) == len(ports)
    assert max(ports) < lowest
    with socket.create_server((endpoint.address, endpoint.api_port)):
        assert endpoint.api_port not in vars(Endpoint.on_free_ports()).values()
