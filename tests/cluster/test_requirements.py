"""The packages that an image installs on top of its base: images/requirements.py."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from paths import REPOSITORY

SCRIPT = REPOSITORY / "images" / "requirements.py"
DEBIANS_TORCH = "2.6.0+debian"
# The Python that runs the tests plays the base image: it holds pytest, and no package named skiff-absent.
PROJECT = """
[project]
dependencies = ["skiff-absent>=1"]
[project.optional-dependencies]
runtime = ["pytest>=8", "torch{torch}", "xgrammar>=0.2"]
"""


def run(folder: Path, torch: str) -> subprocess.CompletedProcess[str]:
    """Run the script in a project that wants this torch."""
    (folder / "pyproject.toml").write_text(PROJECT.format(torch=torch))
    (folder / "constraints.txt").write_text("pytest==8.0.0\nskiff-absent==1.2  # why\n")
    argv = [sys.executable, str(SCRIPT), str(folder / "out"), "runtime"]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


def test_torch_stays_the_bases_and_so_do_the_versions_that_it_holds(tmp_path: Path) -> None:
    """A pin of a package that the base holds would install another build over it."""
    done = run(tmp_path, torch=">=2.0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "requirements.txt").read_text().split() == ["skiff-absent>=1", "pytest>=8"]
    assert (tmp_path / "out" / "alone.txt").read_text() == "xgrammar>=0.2\n", "else it brings triton"
    assert (tmp_path / "out" / "constraints.txt").read_text().split() == ["skiff-absent==1.2"]


@pytest.mark.parametrize("torch", [">=999"])
def test_a_base_without_the_right_torch_ends_the_build(tmp_path: Path, torch: str) -> None:
    """The message says which build argument to change."""
    done = run(tmp_path, torch=torch)
    assert done.returncode != 0
    assert "--build-arg BASE" in done.stderr
    assert "torch>=999" in done.stderr


def test_a_base_of_debians_own_torch_serves_a_cpu() -> None:
    """The torch-cpu stage of images/base.Dockerfile; what a GPU needs of a newer one is asked for by its own extra."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [wanted] = [each for each in map(Requirement, extras["runtime"]) if each.name == "torch"]
    assert wanted.specifier.contains(DEBIANS_TORCH)
