"""Bringing images to the cluster: pushed to the user's registry, loaded into kind, or imported into the one node."""

from __future__ import annotations

import os

import builders
import images
from commands import ClusterError, say, step
from images import IMAGES
from kind import Kind
from onenode import OneNode
from paths import Layout
from providers import External, Provider

NAMES = ("operator", "runtime")


def reference(name: str, provider: Provider) -> str:
    """Return the name by which a pod of the cluster gets an image."""
    if isinstance(provider, External):
        return f"{_repository()}/{name}:{images.version()}"
    return IMAGES[name].reference


def _repository() -> str:
    repository = os.environ.get("IMAGE_REPOSITORY", "").rstrip("/")
    if not repository:
        raise ClusterError(
            "with a KUBECONFIG of your own, set IMAGE_REPOSITORY to where its nodes may pull from, such as registry.example.com/skiff"
        )
    return repository


def deliver(layout: Layout, provider: Provider) -> None:
    """Build what is out of date and bring it to the cluster, if one is up."""
    if isinstance(provider, External):
        _repository()
    builder = builders.choose(layout, for_node=isinstance(provider, OneNode) and layout.state.exists())
    images.build(layout, builder)
    if isinstance(provider, External):
        for name in NAMES:
            target = reference(name, provider)
            with step(f"pushing {target}"):
                builder.push(IMAGES[name].reference, target, layout.logs / f"push-{name}.log")
    elif not layout.state.exists():
        say("the images are built; no cluster is up to bring them to")
    else:
        for name in NAMES:
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
