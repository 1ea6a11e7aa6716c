"""Image builds: when images are rebuilt, their content, and the layers sent to a node."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import archive
import hostconfig
import images
import pytest
from commands import ClusterError
from images import DOCKERFILES, IMAGES
from paths import REPOSITORY

DOCKERFILE = "FROM scratch\nCOPY pyproject.toml ./\nCOPY package package\nCOPY --from=build /built /built\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A small project with a Dockerfile that copies a file and a folder."""
    (tmp_path / "package" / "__pycache__").mkdir(parents=True)
    for name in ("pyproject.toml", "package/module.py", "package/__pycache__/module.pyc", "README.md"):
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    return tmp_path


def source_key(project: Path) -> str:
    """The key of the project's image."""
    return images.source_key(project / "Dockerfile", project)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("package/module.py", True),
        ("package/new.py", True),
        ("pyproject.toml", True),
        ("Dockerfile", True),
        ("README.md", False),
        ("package/__pycache__/module.pyc", False),
    ],
)
def test_an_image_is_built_again_when_what_it_copies_changed(project: Path, name: str, changes: bool) -> None:
    """And for nothing else."""
    before = source_key(project)
    file = project / name
    file.write_text((file.read_text() if file.exists() else "") + "\n# changed\n")
    assert (source_key(project) != before) is changes


def test_a_copied_file_that_is_absent_is_named(project: Path) -> None:
    """The key would otherwise be that of another image."""
    (project / "pyproject.toml").unlink()
    with pytest.raises(ClusterError, match=r"pyproject\.toml"):
        source_key(project)


def test_the_context_lets_in_all_that_the_dockerfiles_copy() -> None:
    """.dockerignore keeps the context small; a file that it forgets ends a build."""
    lines = (REPOSITORY / ".dockerignore").read_text().splitlines()
    allowed = [REPOSITORY / line[1:] for line in lines if line.startswith("!")]
    for image in IMAGES.values():
        for file in images.sources(image.file, REPOSITORY):
            assert any(file.is_relative_to(entry) for entry in allowed), file


def test_the_operator_image_holds_what_the_router_imports_of_the_runtime_and_no_more(tmp_path: Path) -> None:
    """The router runs from the files that the Dockerfile copies, and imports each of them."""
    copied = images.sources(DOCKERFILES / IMAGES["operator"].dockerfile, REPOSITORY)
    runtime = [file.relative_to(REPOSITORY / "runtime") for file in copied if "runtime" in file.parts]
    for file in runtime:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / "runtime" / file, tmp_path / file)
    names = [".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in runtime]
    program = (
        "import sys, skiff_router.__main__, skiff_router.server, skiff_runtime\n"
        f"assert skiff_runtime.__file__.startswith({str(tmp_path)!r}), skiff_runtime.__file__\n"
        "print(*sys.modules)"
    )
    argv = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.split()
    assert not {"aiohttp", "fastapi", "kopf", "kubernetes", "numpy", "pydantic", "torch"} & set(loaded)
    assert sorted(each for each in loaded if each.startswith("skiff_")) == sorted(names)


def test_a_packed_archive_holds_what_the_reader_lacks(tmp_path: Path) -> None:
    """The manifest and the index are always sent; a layer that is there is not."""
    layers = [b"base", b"dependencies", b"application"]
    digests = [hashlib.sha256(data).hexdigest() for data in (b"{}", *layers)]
    for digest, data in zip(digests, (b"{}", *layers), strict=True):
        (tmp_path / digest).write_bytes(data)
    parts = [{"digest": f"sha256:{digest}"} for digest in digests]
    manifest = {
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": parts[0],
        "layers": parts[1:],
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))

    archive.pack(tmp_path, "localhost/skiff/x:1", tmp_path / "x.tar", held={f"sha256:{digests[1]}"})

    with tarfile.open(tmp_path / "x.tar") as packed:
        files = {name: (packed.extractfile(name) or pytest.fail(name)).read() for name in packed.getnames()}
    blobs = {name.rpartition("/")[2]: data for name, data in files.items() if name.startswith("blobs/")}
    assert all(hashlib.sha256(data).hexdigest() == digest for digest, data in blobs.items())
    [descriptor] = json.loads(files["index.json"])["manifests"]
    assert descriptor["annotations"] == {"io.containerd.image.name": "localhost/skiff/x:1"}
    assert set(blobs) == {digests[0], *digests[2:], descriptor["digest"].removeprefix("sha256:")}


def test_secrets_last_as_long_as_their_build() -> None:
    """They name this machine's mirrors."""
    with hostconfig.secrets() as files:
        assert all(file.exists() for file in files.values())
        assert files["pip.conf"].read_text().startswith("[global]\n")
    assert not any(file.exists() for file in files.values())


def test_builds_use_the_machine_s_mirror_or_the_image_s_own_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostconfig, "debian_mirror", lambda: "http://apt.example/debian")
    assert hostconfig.apt_sources() == f"deb http://apt.example/debian {hostconfig.SUITE} main\n"
    monkeypatch.setattr(hostconfig, "debian_mirror", lambda: None)
    assert hostconfig.apt_sources() == ""
