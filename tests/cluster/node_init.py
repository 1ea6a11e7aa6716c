"""The first process of the node's own mount, network and process namespaces: killing it ends everything inside.

Run as `node_init.py STATE IMAGE-STORE` by `unshare`. It makes the namespaces look like a node, says so in STATE/run/init.ready, and then
only reaps orphans.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from paths import PRIVATE_FOLDERS

# What the kubelet's protectKernelDefaults looks for. The values are shown, not set: the settings are the whole machine's.
KERNEL_DEFAULTS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


def mount(*arguments: str | Path) -> None:
    """Run mount(8)."""
    subprocess.run(["mount", *arguments], check=True)


def make_folders(state: Path, image_store: Path) -> None:
    """Cover the machine's folders by private ones; what holds much lies on disk, and the images outlive the node."""
    mount("--make-rshared", "/")
    for folder in PRIVATE_FOLDERS:
        mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
    Path("/run/lock").mkdir()
    on_disk = {
        "/var/lib/kubelet": state / "kubelet",
        "/var/lib/containerd": image_store,
        "/run/volumes": state / "volumes",
    }
    for target, source in on_disk.items():
        source.mkdir(parents=True, exist_ok=True)
        Path(target).mkdir(parents=True)
        mount("--bind", source, target)


def show_kernel_defaults() -> None:
    """Bind files with the wanted values over the kernel's own."""
    shown = Path("/run/kernel-defaults")
    shown.mkdir()
    for name, value in KERNEL_DEFAULTS.items():
        source = shown / name.replace("/", "_")
        source.write_text(f"{value}\n")
        mount("--bind", source, f"/proc/sys/{name}")


def reap() -> None:
    """Wait for orphans, which become children of a namespace's first process, until it is killed."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG) != (0, 0):
                pass
        except ChildProcessError:
            continue


def main() -> None:
    """Prepare the node, report, reap."""
    state, image_store = Path(sys.argv[1]), Path(sys.argv[2])
    make_folders(state, image_store)
    show_kernel_defaults()
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    (state / "run" / "init.ready").touch()
    reap()


if __name__ == "__main__":
    main()
