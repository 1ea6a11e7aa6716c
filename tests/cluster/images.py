"""Skiff's images and what they stand on: each is built again only when something that enters it changed."""

from __future__ import annotations

import functools
import hashlib
import re
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import hostconfig
import toolchain
from builders import Buildah, Builder, Recipe
from commands import ClusterError, run, scratch, step
from hostconfig import SUITE
from paths import REPOSITORY, Layout

DOCKERFILES = REPOSITORY / "images"
CLIENT_FOLDER = REPOSITORY / "tests" / "e2e"
PAUSE = "registry.k8s.io/pause:3.10"
PREFIX = "localhost/skiff"
DEBOOTSTRAP = ("debootstrap", "--variant=minbase")
SOURCES_LIST = "etc/apt/sources.list"
# Files in which debootstrap leaves traces of this machine and its mirror, and files that apt fetches again.
LEFTOVERS = (
    SOURCES_LIST,
    "etc/hostname",
    "etc/resolv.conf",
    "var/cache/apt/archives/*.deb",
    "var/lib/apt/lists/*",
    "var/log/bootstrap.log",
)
DEBIAN_KEY = " ".join([*DEBOOTSTRAP, SUITE, *LEFTOVERS])


@dataclass(frozen=True)
class Image:
    """One image of ours: `base` is the image that its Dockerfile's ARG BASE takes."""

    name: str
    dockerfile: str
    base: str
    target: str = ""
    argument: str = "BASE"
    holds_source: bool = False
    folder: Path = DOCKERFILES

    @property
    def file(self) -> Path:
        """The Dockerfile's path."""
        return self.folder / self.dockerfile

    @property
    def tag(self) -> str:
        """A new tag for each new content, so that a changed image rolls out wherever its name is used."""
        return f"{version()}-{key(self)[:12]}" if self.holds_source else SUITE

    @property
    def reference(self) -> str:
        """The image's name in a local store."""
        return f"{PREFIX}/{self.name}:{self.tag}"


IMAGES = {
    image.name: image
    for image in (
        Image("python", "base.Dockerfile", base="debian", target="python", argument="DEBIAN"),
        Image("torch-cpu", "base.Dockerfile", base="debian", target="torch-cpu", argument="DEBIAN"),
        Image("operator", "operator.Dockerfile", base="python", holds_source=True),
        Image("runtime", "runtime.Dockerfile", base="torch-cpu", holds_source=True),
        Image("client", "client.Dockerfile", base="python", folder=CLIENT_FOLDER),
    )
}


def version() -> str:
    """Return the project's version, from the file that pyproject.toml names."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    source = REPOSITORY / settings["tool"]["hatch"]["version"]["path"]
    match = re.search(r'^__version__ = "(.+)"', source.read_text(), re.MULTILINE)
    if match is None:
        raise ClusterError(f"{source} has no __version__")
    return match[1]


def sources(dockerfile: Path, repository: Path) -> list[Path]:
    """Return the files of the repository that a Dockerfile copies into its image, folders walked."""
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", dockerfile.read_text(), re.MULTILINE)
    files: list[Path] = []
    for word in " ".join(copied).split():
        entry = repository / word
        if not entry.exists():
            raise ClusterError(f"{dockerfile.name} copies {word}, which does not exist")
        files += [entry] if entry.is_file() else (each for each in entry.rglob("*") if each.is_file())
    return sorted(each for each in files if "__pycache__" not in each.parts)


def source_key(dockerfile: Path, repository: Path) -> str:
    """Return a digest of a Dockerfile and of the names and contents of what it copies."""
    digest = hashlib.sha256(dockerfile.read_bytes())
    for file in sources(dockerfile, repository):
        digest.update(f"{file.relative_to(repository)}\0".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


@functools.cache
def key(image: Image) -> str:
    """Return the content key of an image: of its Dockerfile, the sources that it copies, and its base.

    One command computes it once, so that all that it does is about one content although somebody edits meanwhile.
    """
    base = IMAGES.get(image.base)
    below = key(base) if base else DEBIAN_KEY
    return hashlib.sha256(f"{source_key(image.file, REPOSITORY)} {image.target} {below}".encode()).hexdigest()


def note(reference: str, layout: Layout) -> Path:
    """Return the file that says with which key an image was built and which id it got."""
    return layout.images / "keys" / reference.replace("/", "_")


def current(reference: str, wanted: str, layout: Layout, builder: Builder) -> bool:
    """Say whether the builder's store holds the very image that was built with the key `wanted`."""
    known = note(reference, layout)
    return known.exists() and known.read_text() == f"{wanted} {builder.identity(reference)}"


def record(reference: str, key: str, layout: Layout, builder: Builder) -> None:
    """Note with which key an image was built."""
    known = note(reference, layout)
    known.parent.mkdir(parents=True, exist_ok=True)
    known.write_text(f"{key} {builder.identity(reference)}")


def closure(names: Sequence[str]) -> list[Image]:
    """Return the named images and all that they stand on, bases first."""
    wanted = set(names)
    for image in reversed(IMAGES.values()):
        if image.name in wanted:
            wanted.add(image.base)
    return [image for image in IMAGES.values() if image.name in wanted]


def build(layout: Layout, builder: Builder, names: Sequence[str]) -> None:
    """Build those of the named images, and of their bases, that are absent or out of date."""
    for image in closure(names):
        wanted = key(image)
        if current(image.reference, wanted, layout, builder):
            continue
        base = base_reference(image, layout, builder)
        recipe = Recipe(
            reference=image.reference,
            dockerfile=image.file,
            context=REPOSITORY if image.holds_source else image.folder,
            target=image.target,
            arguments=((image.argument, base),),
        )
        with step(f"building the image {image.reference}"), hostconfig.secrets() as secrets:
            builder.build(recipe, secrets, layout.logs / f"image-{image.name}.log")
            record(image.reference, wanted, layout, builder)
        retire(image, layout, builder)
    if isinstance(builder, Buildah):
        builder.prune(layout.logs / "image-prune.log")


def retire(image: Image, layout: Layout, builder: Builder) -> None:
    """Remove the images of earlier contents from the builder's store; the layers that they share stay."""
    for reference in builder.references(f"{PREFIX}/{image.name}"):
        if reference != image.reference:
            builder.remove(reference)
            note(reference, layout).unlink(missing_ok=True)


def base_reference(image: Image, layout: Layout, builder: Builder) -> str:
    """Return the name of an image's base, after making the one that comes from no Dockerfile."""
    base = IMAGES.get(image.base)
    if base:
        return base.reference
    return ensure_debian(layout, builder) if isinstance(builder, Buildah) else f"debian:{SUITE}-slim"


def ensure_debian(layout: Layout, builder: Buildah) -> str:
    """Return the name of a minimal Debian, made by debootstrap from this machine's mirror, or from its own default.

    No registry is needed. Only the default mirror stays in the image, because builds then have no other.
    """
    reference, wanted = f"{PREFIX}/debian:{SUITE}", DEBIAN_KEY
    if current(reference, wanted, layout, builder):
        return reference
    with step(f"making a minimal Debian {SUITE} (once; about 30 s)"), scratch(layout.images) as folder:
        root = folder / "root"
        mirror = hostconfig.debian_mirror()
        argv = [*DEBOOTSTRAP, SUITE, str(root), *([mirror] if mirror else [])]
        run(argv, log=layout.logs / "debootstrap.log", timeout_seconds=1200)
        patterns = LEFTOVERS if mirror else [each for each in LEFTOVERS if each != SOURCES_LIST]
        for leftover in (file for pattern in patterns for file in root.glob(pattern)):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        run(["tar", "-C", root, "-cf", folder / "rootfs.tar", "."], log=layout.logs / "rootfs.log")
        (folder / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
        _build_folder(folder, reference, wanted, layout, builder)
    return reference


def ensure_pause(layout: Layout, builder: Buildah) -> str:
    """Return the name of the image that holds pods' namespaces."""
    wanted = next(toolchain.key(tool) for tool in toolchain.NODE if tool.name == "pause")
    if not current(PAUSE, wanted, layout, builder):
        with step("building the pause image"), scratch(layout.images) as folder:
            shutil.copy(layout.bin / "pause", folder / "pause")
            (folder / "Dockerfile").write_text(
                'FROM scratch\nCOPY pause /pause\nUSER 65535:65535\nENTRYPOINT ["/pause"]\n'
            )
            _build_folder(folder, PAUSE, wanted, layout, builder)
    return PAUSE


def _build_folder(folder: Path, reference: str, wanted: str, layout: Layout, builder: Buildah) -> None:
    recipe = Recipe(reference=reference, dockerfile=folder / "Dockerfile", context=folder)
    builder.build(recipe, {}, layout.logs / f"image-{reference.split('/')[-1].split(':')[0]}.log")
    record(reference, wanted, layout, builder)
