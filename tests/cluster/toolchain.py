"""The binaries of the cluster, built once from Go modules: each is rebuilt only when what it is built from changed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from commands import ClusterError, locked, output, run, scratch, step
from paths import GO_MODULE, Layout

GO_VERSION = (1, 26)
MODULE_INPUTS = ("go.mod", "go.sum", "tools.go")


@dataclass(frozen=True)
class Tool:
    """One Go program: a package of this folder's module, or of a published `version` of its own module.

    `module`: its module, if the program is built in the module's folder. `go install` would ask the Go proxy for all versions,
    which not every proxy lists.
    """

    name: str
    package: str
    version: str = ""
    expected_seconds: int = 10
    module: str = ""


def kubernetes_version() -> str:
    """Return the version, such as `v1.36.2`, that this folder's go.mod requires."""
    match = re.search(r"^\s*k8s\.io/kubernetes (v\S+)", (GO_MODULE / "go.mod").read_text(), re.MULTILINE)
    if match is None:
        raise ClusterError(f"{GO_MODULE / 'go.mod'} requires no k8s.io/kubernetes")
    return match[1]


CONTROL_PLANE = (
    Tool("kube-apiserver", "k8s.io/kubernetes/cmd/kube-apiserver", expected_seconds=250),
    Tool("kube-controller-manager", "k8s.io/kubernetes/cmd/kube-controller-manager", expected_seconds=60),
    Tool("etcd", "go.etcd.io/etcd/server/v3"),
    Tool("kubectl", "k8s.io/kubernetes/cmd/kubectl", expected_seconds=25),
)
NODE = (
    Tool("kube-scheduler", "k8s.io/kubernetes/cmd/kube-scheduler"),
    Tool("kubelet", "k8s.io/kubernetes/cmd/kubelet", expected_seconds=25),
    Tool("kube-proxy", "k8s.io/kubernetes/cmd/kube-proxy"),
    Tool("coredns", "github.com/coredns/coredns", "v1.15.0", expected_seconds=80),
    Tool("pause", "./pause"),
)
HELM = Tool("helm", "helm.sh/helm/v4/cmd/helm", "v4.3.1", expected_seconds=80)
HELM_DOCS = Tool("helm-docs", "github.com/norwoodj/helm-docs/cmd/helm-docs", "v1.14.2")
KWOK = Tool("kwok", "sigs.k8s.io/kwok/cmd/kwok", "v0.8.0", expected_seconds=70)
MODEL_SOURCES = (
    Tool("versitygw", "github.com/versity/versitygw/cmd/versitygw", "v1.8.0", expected_seconds=120),
    Tool("registry", "github.com/distribution/distribution/v3/cmd/registry", "v3.1.2", expected_seconds=80),
)
"""Servers from which models are fetched in tests: S3 over a folder, and an OCI registry."""
ENDPOINT_PICKER = Tool(
    "epp",
    "sigs.k8s.io/gateway-api-inference-extension/cmd/epp",
    "v1.3.0",
    expected_seconds=240,
    module="sigs.k8s.io/gateway-api-inference-extension",
)
"""The endpoint picker of the Gateway API Inference Extension."""
KEDA_MODULE = "github.com/kedacore/keda/v2"
KEDA = tuple(
    Tool(f"keda-{name}", f"{KEDA_MODULE}/cmd/{name}", "v2.21.0", expected_seconds=seconds, module=KEDA_MODULE)
    for name, seconds in (("operator", 600), ("adapter", 60))
)
"""KEDA's operator, and its API server of external metrics."""
KUBECTL = CONTROL_PLANE[-1]
SCHEDULER = NODE[0]
PROMETHEUS_OPERATOR = ("github.com/prometheus-operator/prometheus-operator", "v0.85.0")
"""The module, and its version, whose CustomResourceDefinitions the chart's monitoring objects are tested against."""


def key(tool: Tool) -> str:
    """Return the content key of a tool: equal keys mean that building again would give the same program."""
    digest = hashlib.sha256(f"{tool.package}@{tool.version} {ldflags(tool)}".encode())
    if not tool.version:
        sources = [GO_MODULE / name for name in MODULE_INPUTS]
        if tool.package.startswith("."):
            sources = sorted((GO_MODULE / tool.package).glob("*.go"))
        for source in sources:
            digest.update(source.read_bytes())
    return digest.hexdigest()


def ldflags(tool: Tool) -> str:
    """Return the linker's flags: no symbols, and for Kubernetes' programs the version that they report."""
    if not tool.package.startswith("k8s.io/"):
        return "-s -w"
    return f"-s -w -X k8s.io/component-base/version.gitVersion={kubernetes_version()}"


def require_go() -> None:
    """Raise ClusterError when there is no Go of the needed version, naming what else would do."""
    wanted = ".".join(map(str, GO_VERSION))
    found = "none"
    if shutil.which("go"):
        found = output(["go", "env", "GOVERSION"], cwd=GO_MODULE)
        match = re.match(r"go(\d+)\.(\d+)", found)
        if match and (int(match[1]), int(match[2])) >= GO_VERSION:
            return
    raise ClusterError(
        f"Go {wanted} or later is needed to build a Kubernetes to test on (found: {found}).\n"
        "Install it from https://go.dev/dl/, or set KUBECONFIG to a cluster of yours, or start Docker and install kind."
    )


def ensure(tools: Iterable[Tool], layout: Layout) -> None:
    """Build those of `tools` that are absent or out of date into the layout's bin folder."""
    wanted = list(tools)
    if all(current(tool, layout) for tool in wanted):
        return
    require_go()
    with locked(layout.bin / ".lock"):
        for tool in wanted:
            if not current(tool, layout):
                with step(f"building {tool.name} (once; about {tool.expected_seconds} s on two cores)"):
                    build(tool, layout)


def current(tool: Tool, layout: Layout) -> bool:
    """Say whether the tool's binary is there and was built from today's inputs."""
    mark = layout.bin / f"{tool.name}.key"
    return (layout.bin / tool.name).exists() and mark.exists() and mark.read_text() == key(tool)


def build(tool: Tool, layout: Layout) -> None:
    """Build one tool; the binary replaces the old one only when it is whole."""
    with scratch(layout.bin) as folder:
        built = folder / tool.name
        flags = ["-trimpath", "-ldflags", ldflags(tool)]
        env = {"CGO_ENABLED": "0"}
        log = layout.logs / f"build-{tool.name}.log"
        if tool.module:
            source = f"./{tool.package.removeprefix(tool.module).lstrip('/')}"
            folder_of_module = download(tool.module, tool.version, layout)
            run(["go", "build", *flags, "-o", built, source], log=log, cwd=folder_of_module, env=env)
        elif tool.version:
            run(
                ["go", "install", *flags, f"{tool.package}@{tool.version}"],
                log=log,
                cwd=layout.bin,
                env={**env, "GOBIN": str(folder)},
            )
        else:
            run(["go", "build", *flags, "-o", built, tool.package], log=log, cwd=GO_MODULE, env=env)
        built.replace(layout.bin / tool.name)
    (layout.bin / f"{tool.name}.key").write_text(key(tool))


def download(module: str, version: str, layout: Layout) -> Path:
    """Return the folder of a Go module in the module cache, which is read-only."""
    described = output(["go", "mod", "download", "-json", f"{module}@{version}"], cwd=layout.bin)
    return Path(json.loads(described)["Dir"])


def helm(layout: Layout) -> Path:
    """Return the path of a helm that runs: the one on PATH, else the one built here."""
    found = shutil.which("helm")
    if found:
        return Path(found)
    ensure([HELM], layout)
    return layout.bin / HELM.name


def helm_docs(layout: Layout) -> Path:
    """Return the path of helm-docs, which writes the chart's README; always built here, for its output is compared."""
    ensure([HELM_DOCS], layout)
    return layout.bin / HELM_DOCS.name


def prometheus_operator_crds(layout: Layout) -> Path:
    """Return the folder of the Prometheus operator's CustomResourceDefinitions, fetched with its Go module."""
    module, version = PROMETHEUS_OPERATOR
    folder = layout.bin / f"prometheus-operator-crds-{version}"
    if folder.exists():
        return folder
    require_go()
    with locked(layout.bin / ".lock"), scratch(layout.bin) as copy:
        if not folder.exists():
            with step("fetching the Prometheus operator's definitions (once)"):
                found = json.loads(
                    output(["go", "mod", "download", "-json", f"{module}@{version}"], cwd=copy)
                )
                shutil.copytree(Path(found["Dir"]) / "example" / "prometheus-operator-crd", copy / "crds")
                (copy / "crds").chmod(0o755)  # the module cache is read-only
                (copy / "crds").replace(folder)
    return folder


def model_source(name: str, layout: Layout) -> Path:
    """Return the path of one of MODEL_SOURCES."""
    ensure([tool for tool in MODEL_SOURCES if tool.name == name], layout)
    return layout.bin / name


def endpoint_picker(layout: Layout) -> tuple[Path, Path]:
    """Return the path of the endpoint picker and of its module, whose `config/crd/bases` holds the definitions that it needs."""
    ensure([ENDPOINT_PICKER], layout)
    return layout.bin / ENDPOINT_PICKER.name, download(
        ENDPOINT_PICKER.module, ENDPOINT_PICKER.version, layout
    )


def keda(layout: Layout) -> tuple[Path, Path, Path]:
    """Return the paths of KEDA's operator, of its metrics API server, and of the folder of its definitions."""
    ensure(KEDA, layout)
    operator, adapter = (layout.bin / tool.name for tool in KEDA)
    return operator, adapter, download(KEDA_MODULE, KEDA[0].version, layout) / "config/crd/bases"


def kubectl(layout: Layout) -> Path:
    """Return the path of the kubectl built here, for the one on PATH may be of another version."""
    assets = os.environ.get("KUBEBUILDER_ASSETS")
    if assets and (Path(assets) / KUBECTL.name).exists():
        return Path(assets) / KUBECTL.name
    ensure([KUBECTL], layout)
    return layout.bin / KUBECTL.name


def kwok(layout: Layout) -> tuple[Path, Path]:
    """Return the path of kwok and of its module, whose `kustomize/stage` holds the life cycles that it plays."""
    ensure([KWOK], layout)
    return layout.bin / KWOK.name, download(KWOK.package.removesuffix("/cmd/kwok"), KWOK.version, layout)
