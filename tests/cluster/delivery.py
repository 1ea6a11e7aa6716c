"""Bringing images to the cluster: pushed to the user's registry, loaded into kind, or imported into the one node."""

from __future__ import annotations

import os
from collections.abc import Sequence

import builders
import images
from commands import ClusterError, say, step
from images import IMAGES
from kind import Kind
from onenode import OneNode
from paths import Layout
from providers import External, Provider

NAMES = ("operator", "runtime", "client")
PRODUCT = ("operator", "runtime")
"""What a user runs; the client is for the end-to-end tests."""


def reference(name: str, provider: Provider) -> str:
    """Return the name by which a pod of the cluster gets an image."""
    if isinstance(provider, External):
        return f"{_repository()}/{name}:{IMAGES[name].tag}"
    return IMAGES[name].reference


def _repository() -> str:
    repository = os.environ.get("IMAGE_REPOSITORY", "").rstrip("/")
    if not repository:
        raise ClusterError(
            "with a KUBECONFIG of your own, set IMAGE_REPOSITORY to where its nodes may pull from, such as registry.example.com/skiff"
        )
    return repository


def deliver(layout: Layout, provider: Provider, names: Sequence[str]) -> None:
    """Build what is out of date of the named images and bring them to the cluster, if one is up."""
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ClusterError(f"there is no image {unknown[0]!r}; there are {', '.join(NAMES)}")
    if isinstance(provider, External):
        _repository()
    builder = builders.choose(layout, for_node=isinstance(provider, OneNode) and layout.state.exists())
    images.build(layout, builder, names)
    if isinstance(provider, External):
        for name in names:
            target = reference(name, provider)
            with step(f"pushing {target}"):
                builder.push(IMAGES[name].reference, target, layout.logs / f"push-{name}.log")
    elif not layout.state.exists():
        say("the images are built; no cluster is up to bring them to")
    else:
        for name in names:
            bring(IMAGES[name].reference, layout, provider)


def bring(name: str, layout: Layout, provider: Kind | OneNode) -> None:
    """Bring one image to a cluster made here, unless it got this very image before."""
    mark = provider.deliveries / name.replace("/", "_")
    built = images.note(name, layout).read_text()
    if mark.exists() and mark.read_text() == built:
        return
    with step(f"bringing {name} to the cluster"):
        provider.load(name)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(built)
