"""Cluster providers: a cluster of the user's, kind, or the one-node Kubernetes built here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import kind
from commands import ClusterError, say, succeeds
from kind import Kind
from onenode import OneNode
from paths import Layout
from toolchain import kubectl


@dataclass(frozen=True)
class External:
    """The cluster that the user's KUBECONFIG names: used, never made nor removed."""

    layout: Layout
    kubeconfig: Path
    name = "external"

    def up(self) -> None:
        """Check that the cluster answers."""
        if not self.healthy():
            raise ClusterError(
                f"KUBECONFIG={self.kubeconfig} names a cluster that does not answer; fix it or unset it"
            )
        say(f"using the cluster of KUBECONFIG={self.kubeconfig}")

    def healthy(self) -> bool:
        """Say whether the API server answers."""
        return succeeds([kubectl(self.layout), "--kubeconfig", self.kubeconfig, "get", "--raw", "/readyz"])

    def down(self) -> None:
        """Leave the cluster alone."""
        say(f"the cluster of KUBECONFIG={self.kubeconfig} is yours: left as it is")


Provider = External | Kind | OneNode


def choose(layout: Layout) -> Provider:
    """Return the provider to use: an explicit KUBECONFIG, the cluster that was made before, kind, or one node."""
    explicit = os.environ.get("KUBECONFIG")
    if explicit and Path(explicit).resolve() != layout.kubeconfig:
        return External(layout, Path(explicit).resolve())
    return made(layout) or (Kind(layout) if kind.usable() else OneNode(layout))


def made(layout: Layout) -> Kind | OneNode | None:
    """Return the provider of the cluster in the layout's state, or None when there is no such cluster."""
    if not layout.state.exists():
        return None
    known = layout.provider.read_text() if layout.provider.exists() else ""
    return Kind(layout) if known == Kind.name else OneNode(layout)
