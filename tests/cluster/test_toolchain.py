"""The toolchain: which binaries are built, from which sources, and when they are rebuilt."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import pytest
import toolchain
from paths import GO_MODULE, Layout
from toolchain import (
    CONTROL_PLANE,
    ENDPOINT_PICKER,
    HELM,
    HELM_DOCS,
    KEDA,
    KUBECTL,
    MODEL_SOURCES,
    NODE,
    Tool,
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the Go module, for tests that edit it."""
    copy = tmp_path / "module"
    shutil.copytree(GO_MODULE, copy)
    monkeypatch.setattr(toolchain, "GO_MODULE", copy)
    return copy


def test_every_staging_module_has_the_version_of_kubernetes() -> None:
    """A go.mod whose Kubernetes and staging modules differ does not build, or builds something else."""
    expected = toolchain.kubernetes_version().replace("v1.", "v0.")
    replaced = re.findall(r"^\s*(k8s\.io/\S+) => \1 (v\S+)", (GO_MODULE / "go.mod").read_text(), re.MULTILINE)
    assert len(replaced) > 20
    assert {version for _, version in replaced} == {expected}


def test_tools_have_different_names_and_keys() -> None:
    """One folder holds them all."""
    tools = [*CONTROL_PLANE, *NODE, *MODEL_SOURCES, HELM, HELM_DOCS, ENDPOINT_PICKER, *KEDA]
    assert len({tool.name for tool in tools}) == len({toolchain.key(tool) for tool in tools}) == len(tools)


@pytest.mark.parametrize("name", ["go.mod", "go.sum", "tools.go"])
def test_a_change_of_the_module_changes_the_keys_of_its_tools_alone(module: Path, name: str) -> None:
    """Binaries of another module, or of one file here, are kept."""
    pause = next(tool for tool in NODE if tool.name == "pause")
    before = [toolchain.key(tool) for tool in (KUBECTL, HELM, pause)]
    with (module / name).open("a") as file:
        file.write("\n// changed\n")
    after = [toolchain.key(tool) for tool in (KUBECTL, HELM, pause)]
    assert [old == new for old, new in zip(before, after, strict=True)] == [False, True, True]


def test_a_change_of_a_version_changes_the_key() -> None:
    """A tool of another module is known by its version."""
    assert toolchain.key(HELM) != toolchain.key(dataclasses.replace(HELM, version="v4.0.0"))


def test_a_binary_is_current_while_its_key_is(module: Path, tmp_path: Path) -> None:
    """A binary without its key is one whose build was interrupted."""
    layout, tool = Layout(tmp_path / "cache"), Tool("pause", "./pause")
    layout.bin.mkdir(parents=True)
    assert not toolchain.current(tool, layout)
    (layout.bin / "pause").write_text("")
    assert not toolchain.current(tool, layout)
    (layout.bin / "pause.key").write_text(toolchain.key(tool))
    assert toolchain.current(tool, layout)
    (module / "pause" / "main.go").write_text("package main\n")
    assert not toolchain.current(tool, layout)
