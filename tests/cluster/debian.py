"""Programs that come as Debian packages: installed when absent, with a line that says so, and never left running."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from commands import ClusterError, locked, run, say, scratch, step
from paths import Layout

ALTERNATIVES = "Or set KUBECONFIG to a cluster of yours, or start Docker and install kind."
POLICY = Path("/usr/sbin/policy-rc.d")
POLICY_TEXT = (
    "#!/bin/sh\n# Written for the length of one installation: packages must start no service.\nexit 101\n"
)

# A command, or a file by its path, and the package that holds it.
NODE_PACKAGES = {
    "openssl": "openssl",
    "containerd": "containerd",
    "runc": "runc",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "socat": "socat",
    "ipset": "ipset",
    "ethtool": "ethtool",
    "ip": "iproute2",
    "mount": "mount",
    "unshare": "util-linux",
}
CONTROL_PLANE_PACKAGES = {"openssl": "openssl"}
IMAGE_PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}


def present(what: str) -> bool:
    """Say whether a command, or a file given by its path, exists."""
    return Path(what).exists() if what.startswith("/") else shutil.which(what, path=search_path()) is not None


def search_path() -> str:
    """Return PATH with the administrator's folders, which an ordinary user's PATH leaves out."""
    return f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


def ensure(packages: Mapping[str, str], layout: Layout) -> None:
    """Install the packages whose commands are absent; raises ClusterError that names them where that is impossible."""
    missing = sorted({package for what, package in packages.items() if not present(what)})
    if not missing:
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        why = "this is no Debian" if shutil.which("apt-get") is None else "only root may install them"
        raise ClusterError(f"These Debian packages are missing, and {why}: {names}\n{ALTERNATIVES}")
    say(f"installing the Debian packages that are missing: {names}")
    with step("installing packages"), _no_services():
        _install(missing, layout)


def _install(names: list[str], layout: Layout) -> None:
    argv = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *names]
    log, env = layout.logs / "apt.log", {"DEBIAN_FRONTEND": "noninteractive"}
    try:
        run(argv, log=log, env=env, timeout_seconds=900)
    except ClusterError:
        run(["apt-get", "update", "-qq"], log=layout.logs / "apt-update.log", timeout_seconds=300)
        run(argv, log=log, env=env, timeout_seconds=900)


@contextlib.contextmanager
def _no_services() -> Iterator[None]:
    """Keep packages from starting services, by the switch that Debian has for it."""
    ours = not POLICY.exists() or POLICY.read_text() == POLICY_TEXT
    if ours:
        POLICY.write_text(POLICY_TEXT)
        POLICY.chmod(0o755)
    try:
        yield
    finally:
        if ours:
            POLICY.unlink(missing_ok=True)


def prometheus(layout: Layout) -> dict[str, Path]:
    """Return the paths of `prometheus` and `promtool`: those on PATH, else unpacked from Debian's package.

    Unpacking instead of installing leaves neither a service nor a user behind.
    """
    names = ("prometheus", "promtool")
    found = {name: Path(path) for name in names if (path := shutil.which(name))}
    if len(found) == len(names):
        return found
    if not all((layout.bin / name).exists() for name in names):
        with step("unpacking Debian's prometheus (once)"):
            _unpack("prometheus", names, layout)
    return {name: layout.bin / name for name in names}


def _unpack(package: str, programs: tuple[str, ...], layout: Layout) -> None:
    if shutil.which("apt-get") is None:
        raise ClusterError(f"{package} is missing: put {' and '.join(programs)} on PATH")
    log = layout.logs / f"download-{package}.log"
    with locked(layout.bin / ".lock"), scratch(layout.bin) as folder:
        try:
            run(["apt-get", "download", package], log=log, cwd=folder)
        except ClusterError:
            run(["apt-get", "update", "-qq"], log=layout.logs / "apt-update.log", timeout_seconds=300)
            run(["apt-get", "download", package], log=log, cwd=folder)
        archive = next(folder.glob("*.deb"))
        run(["dpkg-deb", "-x", archive, folder / "root"], log=layout.logs / f"unpack-{package}.log")
        for program in programs:
            (folder / "root" / "usr" / "bin" / program).replace(layout.bin / program)
