"""The two programs that build images: Docker where its daemon runs, else Buildah, which needs none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import debian
import kind
from commands import ClusterError, output, run, succeeds
from paths import Layout

BUILD_SECONDS = 1800
# Each build of changed sources leaves about three images without a name, which are the cache of the next one.
UNNAMED_LIMIT = 40


@dataclass(frozen=True)
class Recipe:
    """One build: a Dockerfile, up to which stage, over which context, with which arguments."""

    reference: str
    dockerfile: Path
    context: Path
    target: str = ""
    arguments: tuple[tuple[str, str], ...] = ()

    def options(self, secrets: Mapping[str, Path]) -> list[str]:
        """Return the options that Docker and Buildah have in common."""
        words = ["--tag", self.reference, "--file", str(self.dockerfile)]
        if self.target:
            words += ["--target", self.target]
        for name, value in self.arguments:
            words += ["--build-arg", f"{name}={value}"]
        for name, file in secrets.items():
            words += ["--secret", f"id={name},src={file}"]
        return [*words, str(self.context)]


class Builder(Protocol):
    """The interface of an image builder."""

    def build(self, recipe: Recipe, secrets: Mapping[str, Path], log: Path) -> None:
        """Build an image."""

    def identity(self, reference: str) -> str | None:
        """Return the id of an image, or None when there is no such image."""

    def references(self, repository: str) -> list[str]:
        """Return the names with tags of the images that a repository, such as localhost/skiff/runtime, holds."""

    def remove(self, reference: str) -> None:
        """Remove an image's name, and its layers where no other image needs them."""

    def push(self, reference: str, repository_reference: str, log: Path) -> None:
        """Push an image to a registry under another name."""


@dataclass(frozen=True)
class Docker:
    """Docker with BuildKit."""

    def build(self, recipe: Recipe, secrets: Mapping[str, Path], log: Path) -> None:
        """See Builder."""
        argv = ["docker", "build", *recipe.options(secrets)]
        run(argv, log=log, env={"DOCKER_BUILDKIT": "1"}, timeout_seconds=BUILD_SECONDS)

    def identity(self, reference: str) -> str | None:
        """See Builder."""
        try:
            return output(["docker", "image", "inspect", "--format", "{{.Id}}", reference])
        except ClusterError:
            return None

    def references(self, repository: str) -> list[str]:
        """See Builder."""
        return output(["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository]).split()

    def remove(self, reference: str) -> None:
        """See Builder; fine when a container of the user's needs it."""
        succeeds(["docker", "image", "rm", reference])

    def push(self, reference: str, repository_reference: str, log: Path) -> None:
        """See Builder."""
        output(["docker", "tag", reference, repository_reference])
        run(["docker", "push", repository_reference], log=log, timeout_seconds=BUILD_SECONDS)


@dataclass(frozen=True)
class Buildah:
    """Buildah with a storage of its own under the cache, so that the user's images stay apart."""

    layout: Layout

    def command(self, *words: str) -> list[str]:
        """Return a buildah command, in a mount namespace of its own: its mounts, and its notes in /var/lib, end with it."""
        storage, running = self.layout.images / "storage", self.layout.images / "run"
        paths = ["--root", str(storage), "--runroot", str(running), "--storage-driver", "overlay"]
        settings = running / "containers.conf"
        running.mkdir(parents=True, exist_ok=True)
        settings.write_text(f'[network]\nnetwork_config_dir = "{running / "cni"}"\n')
        namespace = ["unshare", "-m", "--propagation", "private"]
        private = ["sh", "-c", 'mount -t tmpfs tmpfs /var/lib && exec "$@"', "sh"]
        return [*namespace, *private, "env", f"CONTAINERS_CONF={settings}", "buildah", *paths, *words]

    def build(self, recipe: Recipe, secrets: Mapping[str, Path], log: Path) -> None:
        """See Builder; nothing is pulled, for every base is built here."""
        options = ["--isolation", "chroot", "--layers", "--pull-never", *recipe.options(secrets)]
        run(self.command("build", *options), log=log, timeout_seconds=BUILD_SECONDS)

    def identity(self, reference: str) -> str | None:
        """See Builder."""
        if not (self.layout.images / "storage").exists():
            return None
        try:
            return output(
                self.command("inspect", "--type", "image", "--format", "{{.FromImageID}}", reference)
            )
        except ClusterError:
            return None

    def references(self, repository: str) -> list[str]:
        """See Builder."""
        named = output(
            self.command("images", "--filter", "dangling=false", "--format", "{{.Name}}:{{.Tag}}")
        ).split()
        return [reference for reference in named if reference.rpartition(":")[0] == repository]

    def remove(self, reference: str) -> None:
        """See Builder; fine when a working container of an interrupted build needs it: `prune` removes those."""
        succeeds(self.command("rmi", reference), timeout_seconds=120)

    def push(self, reference: str, repository_reference: str, log: Path) -> None:
        """See Builder."""
        argv = self.command("push", reference, f"docker://{repository_reference}")
        run(argv, log=log, timeout_seconds=BUILD_SECONDS)

    def prune(self, log: Path) -> None:
        """Remove images without a name when there are many: the next build then installs the dependencies again."""
        unnamed = output(self.command("images", "--filter", "dangling=true", "--quiet")).split()
        if len(unnamed) > UNNAMED_LIMIT:
            run(self.command("rm", "--all"), log=log)  # working containers of interrupted builds hold images
            run(self.command("rmi", "--prune"), log=log)

    def copy_to_folder(self, reference: str, folder: Path, log: Path) -> None:
        """Write an image into a folder: its manifest, and each part, layers uncompressed, named by its digest."""
        argv = self.command("push", "--disable-compression", reference, f"dir:{folder}")
        run(argv, log=log, timeout_seconds=BUILD_SECONDS)


def choose(layout: Layout, *, for_node: bool) -> Builder:
    """Return the builder to use here, always Buildah `for_node`; raises ClusterError when neither can be had."""
    if not for_node and kind.docker_runs():
        return Docker()
    debian.ensure(debian.IMAGE_PACKAGES, layout)
    if os.geteuid() != 0 or not succeeds(["buildah", "--version"]):
        raise ClusterError("building images needs a running Docker, or root and buildah")
    return Buildah(layout)
