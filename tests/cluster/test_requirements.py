"""What an image installs beside its base: images/requirements.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from paths import REPOSITORY

SCRIPT = REPOSITORY / "images" / "requirements.py"
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
