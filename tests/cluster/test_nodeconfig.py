"""The configuration files of the one-node cluster."""

from __future__ import annotations

import json
from pathlib import Path

import nodeconfig
import pytest
import yaml
from node import NODE_ADDRESS, POD_NETWORK
from paths import CONF, Layout


def test_every_template_is_rendered_whole(tmp_path: Path) -> None:
    """No placeholder is left, and what is YAML or JSON still is."""
    nodeconfig.write(Layout(tmp_path), runc=Path("/usr/sbin/runc"))
    conf = nodeconfig.folder(Layout(tmp_path))
    templates = [file.relative_to(CONF) for file in CONF.rglob("*") if file.is_file()]
    for template in templates:
        assert "$" not in (conf / template).read_text(), template
    for name in ("kubelet.yaml", "kube-proxy.yaml"):
        assert yaml.safe_load((conf / name).read_text())["kind"].endswith("Configuration")
    plugins = json.loads((conf / "cni" / "10-pods.conflist").read_text())["plugins"]
    assert plugins[0]["ipam"]["ranges"] == [[{"subnet": POD_NETWORK}]]


def test_the_kubeconfig_is_private_and_names_the_node(tmp_path: Path) -> None:
    """It holds the administrator's key."""
    layout = Layout(tmp_path)
    nodeconfig.write(layout, runc=Path("/usr/sbin/runc"))
    config = yaml.safe_load(layout.kubeconfig.read_text())
    assert config["clusters"][0]["cluster"]["server"] == f"https://{NODE_ADDRESS}:6443"
    assert layout.kubeconfig.stat().st_mode & 0o077 == 0


def test_an_unknown_placeholder_is_an_error(tmp_path: Path) -> None:
    """It would otherwise reach a program as text."""
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "file").write_text("address: $nowhere\n")
    with pytest.raises(KeyError, match="nowhere"):
        nodeconfig.render(tmp_path / "conf", tmp_path / "out", {"node_address": "10.0.0.1"})
