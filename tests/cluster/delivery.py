"""Bringing images to the cluster: pushed to the user's registry, loaded into kind, or imported into the one node."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

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
"""The images that users run; the client image is for the end-to-end tests."""
KEPT = 3
"""Contents of an image that a cluster keeps: pods of earlier revisions, and a rollback, still need theirs."""


def reference(name: str, layout: Layout, provider: Provider) -> str:
    """Return the name by which a pod gets an image: the one delivered last, else that of today's sources."""
    delivered = _latest(name, layout)
    local = delivered.read_text() if delivered.exists() else IMAGES[name].reference
    return f"{_repository()}/{name}:{local.rpartition(':')[2]}" if isinstance(provider, External) else local


def _latest(name: str, layout: Layout) -> Path:
    return layout.images / "latest" / name


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
            target = f"{_repository()}/{name}:{IMAGES[name].tag}"
            with step(f"pushing {target}"):
                builder.push(IMAGES[name].reference, target, layout.logs / f"push-{name}.log")
    elif layout.state.exists():
        for name in names:
            bring(name, layout, provider)
    else:
        say("the images are built; no cluster is up to bring them to")
    for name in names:
        _latest(name, layout).parent.mkdir(parents=True, exist_ok=True)
        _latest(name, layout).write_text(IMAGES[name].reference)


def bring(name: str, layout: Layout, provider: Kind | OneNode) -> None:
    """Bring one image to a cluster made here, unless it holds this very image already; forget old ones."""
    image = IMAGES[name].reference
    built = images.note(image, layout).read_text()
    mark = provider.deliveries / name / IMAGES[name].tag
    if not (mark.exists() and mark.read_text() == built):
        with step(f"bringing {image} to the cluster"):
            provider.load(image)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.write_text(built)
    forget_old(name, mark.parent, provider)


def forget_old(name: str, marks: Path, provider: Kind | OneNode) -> None:
    """Remove all but the KEPT newest contents of an image from the cluster; each mark holds a key and an image id."""
    by_age = sorted(marks.iterdir(), key=lambda each: each.stat().st_mtime)
    kept = {mark.read_text().split()[1] for mark in by_age[-KEPT:]}
    for mark in by_age[:-KEPT]:
        identity = mark.read_text().split()[1]
        provider.forget(f"{images.PREFIX}/{name}:{mark.name}", None if identity in kept else identity)
        mark.unlink()
