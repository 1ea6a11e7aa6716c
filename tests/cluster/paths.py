"""Paths of the test cluster: one cache folder outside the clone.

`bin/` and `images/` hold what was built and stay until `down --purge`; `state/` is the running cluster and goes with `down`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from commands import ClusterError

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
CONF = HERE / "conf"
GO_MODULE = HERE / "kubernetes"
# Folders in which a node's programs and Buildah write by habit: they are given empty ones, so that the machine's stay as they are.
PRIVATE_FOLDERS = ("/run", "/var/lib", "/var/log")


@dataclass(frozen=True)
class Layout:
    """The folders under one cache root."""

    root: Path

    @property
    def bin(self) -> Path:
        """Built binaries, each beside a `.key` file that says from what."""
        return self.root / "bin"

    @property
    def images(self) -> Path:
        """The image builder's storage, the node's image store, and notes of what is in them."""
        return self.root / "images"

    @property
    def logs(self) -> Path:
        """Output of builds, one file a step."""
        return self.root / "logs"

    @property
    def state(self) -> Path:
        """Everything of the running cluster: keys, data, logs, process ids."""
        return self.root / "state"

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig of the cluster that `up` made."""
        return self.state / "kubeconfig"

    @property
    def provider(self) -> Path:
        """A file that names which provider made the cluster in `state`."""
        return self.state / "provider"

    @property
    def lock(self) -> Path:
        """The file whose lock serialises every command that changes something."""
        return self.root / "lock"


def layout() -> Layout:
    """Return the layout under SKIFF_CLUSTER_CACHE, or under the user's cache folder.

    Raises ClusterError where that lies in a folder that the node covers by a private one.
    """
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    root = Path(os.environ.get("SKIFF_CLUSTER_CACHE") or Path(base) / "skiff-cluster").resolve()
    covering = next((folder for folder in PRIVATE_FOLDERS if root.is_relative_to(folder)), None)
    if covering:
        raise ClusterError(
            f"{root} lies in {covering}, which the node hides: set SKIFF_CLUSTER_CACHE to a folder elsewhere"
        )
    return Layout(root)
