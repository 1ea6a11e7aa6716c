"""etcd, API server and controller manager: the part of a Kubernetes that needs neither root nor a node.

The operator's integration tests use it directly:

    with ControlPlane() as plane:
        client = connect(plane.kubeconfig)

Many may run side by side; each takes free ports of the loopback interface and ends with the process that started it.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from types import TracebackType

import debian
from apiclient import ApiClient
from commands import ClusterError, wait_for
from daemons import Daemon
from paths import layout
from pki import Authority
from toolchain import CONTROL_PLANE, ensure

SERVICE_NETWORK = "10.96.0.0/16"
SERVICE_NAMES = (
    "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:10.96.0.1"
)
AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - {level: None, userGroups: ["system:serviceaccounts:kube-system"]}
  - {level: Metadata, userGroups: ["system:serviceaccounts"]}
  - {level: None}
"""
"""Every request of a service account that is no controller of Kubernetes' own, such as the operator's."""
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
READY_SECONDS = 60
ATTEMPTS = 3
FIRST_PORT = 20_000
EPHEMERAL_PORT = 32_768
"""The first port of ``net.ipv4.ip_local_port_range``, as Linux sets it."""
PORTS = 4


@dataclass(frozen=True)
class Endpoint:
    """The addresses on which the control plane listens."""

    address: str = "127.0.0.1"
    api_port: int = 6443
    etcd_port: int = 2379
    etcd_peer_port: int = 2380
    manager_port: int = 10257

    @classmethod
    def on_free_ports(cls) -> Endpoint:
        """Choose free ports of the loopback interface, below those that Linux gives to outgoing connections.

        A program that is stopped and started again has its port again, which no connection took in the meantime.
        """
        first = FIRST_PORT + os.getpid() * PORTS % (EPHEMERAL_PORT - FIRST_PORT)
        free = (
            port for port in chain(range(first, EPHEMERAL_PORT), range(FIRST_PORT, first)) if is_free(port)
        )
        return cls("127.0.0.1", *islice(free, PORTS))


def is_free(port: int) -> bool:
    """Return whether a server could listen on a port of the loopback interface."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def create_pki(directory: Path, *, addresses: str = "") -> Authority:
    """Make the authority and the control plane's certificates; `addresses` adds subjectAltNames to the API server's."""
    authority = Authority(directory)
    authority.create()
    names = f"{SERVICE_NAMES},{addresses}" if addresses else SERVICE_NAMES
    authority.issue("apiserver", "/CN=kube-apiserver", names)
    authority.issue("admin", "/O=system:masters/CN=admin")
    authority.issue("controller-manager", "/CN=system:kube-controller-manager", "DNS:localhost,IP:127.0.0.1")
    authority.issue("front-proxy", "/CN=front-proxy")
    return authority


def etcd_arguments(endpoint: Endpoint, data: Path) -> list[str]:
    """Return etcd's flags: no fsync, for nothing in it must outlive the machine."""
    client = f"http://127.0.0.1:{endpoint.etcd_port}"
    peer = f"http://127.0.0.1:{endpoint.etcd_peer_port}"
    return [
        "--name=skiff",
        f"--data-dir={data}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=skiff={peer}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def apiserver_arguments(endpoint: Endpoint, authority: Authority, scratch: Path) -> list[str]:
    """Return the API server's flags that both kinds of cluster share."""
    return [
        f"--etcd-servers=http://127.0.0.1:{endpoint.etcd_port}",
        f"--secure-port={endpoint.api_port}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--tls-cert-file={authority.path('apiserver', 'crt')}",
        f"--tls-private-key-file={authority.path('apiserver', 'key')}",
        f"--client-ca-file={authority.certificate}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={authority.path('sa', 'pub')}",
        f"--service-account-signing-key-file={authority.path('sa', 'key')}",
        f"--requestheader-client-ca-file={authority.certificate}",
        "--requestheader-allowed-names=front-proxy",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        f"--proxy-client-cert-file={authority.path('front-proxy', 'crt')}",
        f"--proxy-client-key-file={authority.path('front-proxy', 'key')}",
        f"--cert-dir={scratch}",
    ]


def manager_arguments(endpoint: Endpoint, authority: Authority, kubeconfig: Path, scratch: Path) -> list[str]:
    """Return the controller manager's flags."""
    return [
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--bind-address=127.0.0.1",
        f"--secure-port={endpoint.manager_port}",
        f"--root-ca-file={authority.certificate}",
        f"--service-account-private-key-file={authority.path('sa', 'key')}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        f"--cluster-signing-cert-file={authority.certificate}",
        f"--cluster-signing-key-file={authority.key}",
        f"--flex-volume-plugin-dir={scratch / 'volumeplugins'}",
        f"--cert-dir={scratch}",
    ]


def binary(name: str) -> Path:
    """Return a control-plane program: from KUBEBUILDER_ASSETS where that folder has it, else built here."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets and (Path(assets) / name).exists():
        return Path(assets) / name
    paths = layout()
    ensure([tool for tool in CONTROL_PLANE if tool.name == name], paths)
    return paths.bin / name


class ControlPlane:
    """A control plane whose keys, data and logs lie in `directory`; without one, in a folder that `stop` removes.

    `with_parent` ends it with the process that started it; `manager_flags` are more flags of the controller manager. With
    `audit`, requests are logged by AUDIT_POLICY.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        with_parent: bool = True,
        manager_flags: Sequence[str] = (),
        audit: bool = False,
    ) -> None:
        self.temporary = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="skiff-control-plane-"))
        self.with_parent = with_parent
        self.manager_flags = manager_flags
        self.audit = audit
        self.daemons = {name: Daemon(name, self.directory / "run") for name in PROGRAMS}

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.directory / "kubeconfig"

    @property
    def audit_log(self) -> Path:
        """The API server's log of requests, one JSON object a line."""
        return self.directory / "audit.log"

    def start(self) -> None:
        """Start everything and wait until the API server is ready; another process may take a port, so try again."""
        debian.ensure(debian.CONTROL_PLANE_PACKAGES, layout())
        programs = {name: binary(name) for name in PROGRAMS}
        for attempt in range(1, ATTEMPTS + 1):
            try:
                self._start(programs, Endpoint.on_free_ports())
                return
            except ClusterError:
                self._stop_daemons()
                if attempt == ATTEMPTS:
                    raise

    def _start(self, programs: dict[str, Path], endpoint: Endpoint) -> None:
        folder, scratch = self.directory, self.directory / "run"
        for stale in ("etcd", "pki", "run"):
            shutil.rmtree(folder / stale, ignore_errors=True)
        self.audit_log.unlink(missing_ok=True)
        authority = create_pki(folder / "pki")
        server = f"https://{endpoint.address}:{endpoint.api_port}"
        self.kubeconfig.write_text(authority.kubeconfig("admin", server=server))
        self.kubeconfig.chmod(0o600)
        manager = folder / "pki" / "controller-manager.kubeconfig"
        manager.write_text(authority.kubeconfig("controller-manager", server=server))
        # Nothing reaches this API server by its Service, so it needs no address beyond the loopback interface's.
        local = [
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
        ]
        if self.audit:
            audit_policy = folder / "audit-policy.yaml"
            audit_policy.write_text(AUDIT_POLICY)
            local += [f"--audit-policy-file={audit_policy}", f"--audit-log-path={self.audit_log}"]
        arguments = {
            "etcd": etcd_arguments(endpoint, folder / "etcd"),
            "kube-apiserver": [*apiserver_arguments(endpoint, authority, scratch), *local],
            "kube-controller-manager": [
                *manager_arguments(endpoint, authority, manager, scratch),
                *self.manager_flags,
            ],
        }
        self._commands: dict[str, list[str | Path]] = {
            name: [programs[name], *arguments[name]] for name in PROGRAMS
        }
        self._client = ApiClient(authority, endpoint.address, endpoint.api_port)
        for name, daemon in self.daemons.items():
            if name == "kube-controller-manager":
                await_ready(self._client, list(self.daemons.values())[:2])
            daemon.start(self._commands[name], with_parent=self.with_parent)
        await_default_account(self._client)

    def restart(self, name: str) -> None:
        """Stop one program and start it again with the same data, and wait until the API server is ready."""
        self.daemons[name].stop()
        self.daemons[name].start(self._commands[name], with_parent=self.with_parent)
        await_ready(self._client, list(self.daemons.values()))

    def _stop_daemons(self) -> None:
        for daemon in reversed(self.daemons.values()):
            daemon.stop()

    def stop(self) -> None:
        """End every process, and remove the folder when it is a temporary one."""
        self._stop_daemons()
        if self.temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> ControlPlane:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def await_ready(client: ApiClient, daemons: list[Daemon]) -> None:
    """Wait until the API server is ready; raises ClusterError with the log's end when one of `daemons` ends before."""

    def ready() -> bool:
        for daemon in daemons:
            daemon.require()
        return client.answers("/readyz")

    wait_for("a ready API server", ready, timeout_seconds=READY_SECONDS)


def await_default_account(client: ApiClient) -> None:
    """Wait for the default namespace's service account, without which no pod can be made."""
    path = "/api/v1/namespaces/default/serviceaccounts/default"
    wait_for("the default service account", lambda: client.answers(path), timeout_seconds=READY_SECONDS)
