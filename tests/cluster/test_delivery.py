"""Image delivery: the images that a cluster keeps, and the names by which pods pull them."""

from __future__ import annotations

import os
from pathlib import Path

import delivery
import pytest
from commands import ClusterError
from onenode import OneNode
from paths import Layout
from providers import External


class Recorder(OneNode):
    """A node of which only the calls of `forget` are seen."""

    forgotten: list[tuple[str, str | None]]

    def forget(self, image: str, identity: str | None) -> None:
        self.forgotten.append((image, identity))


def test_the_newest_contents_stay_and_an_id_goes_with_its_last_name(tmp_path: Path) -> None:
    """A rollback needs an earlier content; an id that a kept name has too must stay."""
    marks = tmp_path / "runtime"
    marks.mkdir()
    for age, (tag, identity) in enumerate([("5", "aa"), ("4", "bb"), ("3", "bb"), ("2", "cc"), ("1", "dd")]):
        (marks / tag).write_text(f"key-{tag} {identity}")
        os.utime(marks / tag, (age, age))
    node = Recorder(Layout(tmp_path))
    object.__setattr__(node, "forgotten", [])
    delivery.forget_old("runtime", marks, node)
    assert sorted(each.name for each in marks.iterdir()) == ["1", "2", "3"]
    assert node.forgotten == [("localhost/skiff/runtime:5", "aa"), ("localhost/skiff/runtime:4", None)]


def test_a_users_cluster_pulls_from_the_users_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the tag that was delivered last; without a registry's name there is nowhere to push."""
    layout = Layout(tmp_path)
    (layout.images / "latest").mkdir(parents=True)
    (layout.images / "latest" / "runtime").write_text("localhost/skiff/runtime:0.1.0-abc")
    external = External(layout, tmp_path / "kubeconfig")
    monkeypatch.setenv("IMAGE_REPOSITORY", "registry.example.com:5000/team/")
    assert (
        delivery.reference("runtime", layout, external) == "registry.example.com:5000/team/runtime:0.1.0-abc"
    )
    assert delivery.reference("runtime", layout, OneNode(layout)) == "localhost/skiff/runtime:0.1.0-abc"
    monkeypatch.delenv("IMAGE_REPOSITORY")
    with pytest.raises(ClusterError, match="IMAGE_REPOSITORY"):
        delivery.reference("runtime", layout, external)
