"""The configuration files of a one-node cluster: certificates, kubeconfigs and the rendered templates of `conf/`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Template

from controlplane import Endpoint, create_pki
from node import NODE_ADDRESS, NODE_NAME, POD_NETWORK
from paths import CONF, Layout
from pki import Authority

ENDPOINT = Endpoint(address=NODE_ADDRESS)
# Subject and alternative names of what the node's own programs show, by file name.
IDENTITIES = {
    "kube-scheduler": ("/CN=system:kube-scheduler", ""),
    "kube-proxy": ("/CN=system:kube-proxy", ""),
    "coredns": ("/O=system:masters/CN=coredns", ""),
    "kubelet-client": ("/O=system:masters/CN=kube-apiserver-kubelet-client", ""),
    "node": (
        f"/O=system:nodes/CN=system:node:{NODE_NAME}",
        f"DNS:{NODE_NAME},IP:127.0.0.1,IP:{NODE_ADDRESS}",
    ),
}
USERS = ("controller-manager", "kube-scheduler", "kube-proxy", "coredns", "node")


def folder(layout: Layout) -> Path:
    """Return where the rendered files lie."""
    return layout.state / "conf"


def write(layout: Layout, *, runc: Path) -> Authority:
    """Write every file and return the authority that signed the certificates."""
    conf = folder(layout)
    authority = create_pki(layout.state / "pki", addresses=f"IP:{NODE_ADDRESS}")
    for name, (subject, alternative_names) in IDENTITIES.items():
        authority.issue(name, subject, alternative_names)
    values = {
        "conf": str(conf),
        "pki": str(authority.directory),
        "runc": str(runc),
        "node_address": NODE_ADDRESS,
        "node_name": NODE_NAME,
        "pod_network": POD_NETWORK,
    }
    render(CONF, conf, values)
    server = f"https://{NODE_ADDRESS}:{ENDPOINT.api_port}"
    for user in USERS:
        (conf / f"{user}.kubeconfig").write_text(authority.kubeconfig(user, server=server))
    layout.kubeconfig.write_text(authority.kubeconfig("admin", server=server))
    layout.kubeconfig.chmod(0o600)
    return authority


def render(source: Path, target: Path, values: Mapping[str, str]) -> None:
    """Copy a folder of templates, with `$name` replaced in each file; an unknown name raises KeyError."""
    for template in sorted(source.rglob("*")):
        if template.is_file():
            file = target / template.relative_to(source)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(Template(template.read_text()).substitute(values))
