"""Releases of the chart on a real API server, by the real helm: side by side, one after the other, and upgraded."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from apiserver import MERGE, ApiServer
from controlplane import ControlPlane
from helm import NAMESPACE, ROOT, Helm, HelmError
from hook_runner import HookRunner
from installation import RIGHTS, Installation
from operator_process import PACKAGES, eventually

import skiff_runtime
from skiff_runtime import contract

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = f"{CRDS}/inferenceservices.serving.skiff.dev"
MANIFEST = ROOT / "manifests/crds/inferenceservices.yaml"
ADAPTERS = ROOT / "manifests/crds/loraadapters.yaml"
HOOKS = "app.kubernetes.io/component=hook"


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane of this file's own, for its CRD comes and goes."""
    with ControlPlane() as plane:
        yield plane


@pytest.fixture(scope="module")
def runner(plane: ControlPlane) -> Iterator[HookRunner]:
    """The kubelet of all hooks."""
    with HookRunner(ApiServer(plane.kubeconfig), plane.kubeconfig, HOOKS) as runner:
        yield runner


@pytest.fixture(scope="module")
def helm(plane: ControlPlane, runner: HookRunner) -> Helm:
    """Helm on that control plane."""
    return Helm(plane.kubeconfig)


@pytest.fixture
def server(plane: ControlPlane, helm: Helm) -> Iterator[ApiServer]:
    """The API server; afterwards without releases and without the CRD.

    Its storage must be ready when it is deleted: the API server, which first looks for objects to delete, would otherwise
    fail and retry later and later.
    """
    server = ApiServer(plane.kubeconfig)
    yield server
    for release in json.loads(helm.run("list", "--all-namespaces", "--output", "json")):
        helm.uninstall(release["name"], release["namespace"])
    for body in server.request("GET", CRDS)["items"]:
        spec = body["spec"]
        path = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        eventually(partial(server.is_served, path), "its objects can be listed")
        server.request("DELETE", f"{CRDS}/{body['metadata']['name']}")


def make_namespaces(server: ApiServer, *names: str) -> None:
    """Create namespaces that do not exist."""
    existing = {each["metadata"]["name"] for each in server.request("GET", "/api/v1/namespaces")["items"]}
    for name in names:
        if name not in existing:
            server.in_namespace(name).create_namespace()


def create_service(server: ApiServer, namespace: str) -> Any:
    """Create the demo service."""
    body = {
        "apiVersion": f"{contract.API_GROUP}/{contract.API_VERSION}",
        "kind": "InferenceService",
        "metadata": {"name": "llama"},
        "spec": {"model": {"uri": "demo://"}},
    }
    return server.in_namespace(namespace).create("inferenceservices", body)


def test_a_kept_crd_does_not_block_another_release(helm: Helm, server: ApiServer) -> None:
    """An earlier chart marked the CRD as its release's own; whose it was is of no account."""
    owned = {"labels": {"app.kubernetes.io/managed-by": "Helm"}}
    owned["annotations"] = {"meta.helm.sh/release-name": "gone", "meta.helm.sh/release-namespace": "gone"}
    helm.install(release="first", namespace="one")
    make_namespaces(server, "models")
    made = create_service(server, "models")
    helm.uninstall("first", "one")
    server.request("PATCH", CRD, {"metadata": owned}, kind=MERGE)
    helm.install(release="second", namespace="two")
    helm.upgrade("workers=4", release="second", namespace="two")
    helm.uninstall("second", "two")
    found = server.in_namespace("models").get("inferenceservices", "llama")
    assert found["metadata"]["uid"] == made["metadata"]["uid"], "no InferenceService goes with a release"


def test_releases_of_one_name_stand_side_by_side(helm: Helm, server: ApiServer) -> None:
    """Whichever is upgraded or removed, the other's rights and the CRD stay."""
    make_namespaces(server, "team-b")
    helm.install(namespace="system-a")
    helm.install("watchNamespaces={team-b}", namespace="system-b")
    helm.upgrade("workers=4", "crd.install=false", namespace="system-a")
    before = rights(server, "system-b")
    assert before and rights(server, "system-a")
    helm.uninstall(namespace="system-a")
    assert rights(server, "system-b") == before and not rights(server, "system-a")
    helm.upgrade("watchNamespaces={team-b}", "workers=4", namespace="system-b")
    create_service(server, "team-b")


def rights(server: ApiServer, namespace: str) -> list[tuple[str, str]]:
    """The cluster-wide roles and bindings of the release in a namespace."""
    found = []
    for plural in ("clusterroles", "clusterrolebindings"):
        items = server.request("GET", f"{RIGHTS}/{plural}")["items"]
        names = [each["metadata"]["name"] for each in items]
        found += [(plural, name) for name in names if name.startswith(f"skiff:{namespace}:")]
    return found


def test_an_upgrade_renews_the_crd_and_never_an_older_one(helm: Helm, server: ApiServer) -> None:
    helm.install()
    column = {"name": "Own", "type": "string", "jsonPath": ".metadata.name"}
    for version, stays in (("0.0.9", False), ("99.0.0", True)):
        changed = server.request("GET", CRD)
        changed["metadata"]["labels"]["app.kubernetes.io/version"] = version
        changed["spec"]["versions"][0]["additionalPrinterColumns"].append(column)
        server.request("PUT", CRD, changed)
        helm.upgrade()
        after = server.request("GET", CRD)
        assert (column in after["spec"]["versions"][0]["additionalPrinterColumns"]) == stays, version
        labelled = after["metadata"]["labels"]["app.kubernetes.io/version"]
        assert labelled == (version if stays else skiff_runtime.__version__)


@contextlib.contextmanager
def installing(plane: ControlPlane, folder: Path, **spec: str) -> Iterator[subprocess.Popen[str]]:
    """The hook's program as a process of the administrator's, with fields of the definition's spec replaced."""
    body = yaml.safe_load(MANIFEST.read_text())
    body["spec"].update(spec)
    (folder / "crd.json").write_text(json.dumps(body))
    environ = {**os.environ, "KUBECONFIG": str(plane.kubeconfig), "PYTHONPATH": os.pathsep.join(PACKAGES)}
    command = [sys.executable, "-m", "skiff_operator.install_crd", str(folder / "crd.json")]
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as process:
        yield process


def test_a_definition_that_is_refused_is_named(
    plane: ControlPlane, server: ApiServer, tmp_path: Path
) -> None:
    with installing(plane, tmp_path, scope="Galactic") as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 1 and "Galactic" in said and "Traceback" not in said


def test_a_definition_that_is_being_deleted_is_awaited(
    plane: ControlPlane, server: ApiServer, tmp_path: Path
) -> None:
    server.install(MANIFEST)
    server.request("PATCH", CRD, {"metadata": {"finalizers": ["tests.skiff.dev/hold"]}}, kind=MERGE)
    uid = server.request("DELETE", CRD)["metadata"]["uid"]
    with installing(plane, tmp_path) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        server.request("PATCH", CRD, {"metadata": {"finalizers": []}}, kind=MERGE)
        assert process.wait(60) == 0
    assert server.request("GET", CRD)["metadata"]["uid"] != uid


def test_the_users_roles_hold_rights_to_inferenceservices(helm: Helm, server: ApiServer) -> None:
    helm.install("crd.install=false")
    make_namespaces(server, "people")
    expected = {
        "view": {"get": True, "list": True, "watch": True, "create": False, "delete": False},
        "edit": {"get": True, "create": True, "patch": True, "deletecollection": True},
        "admin": {"list": True, "update": True, "delete": True},
    }
    for role, verbs in expected.items():
        bind(server, "people", role)
        for verb, allowed in verbs.items():
            eventually(lambda: may(server, role, verb, "") == allowed, f"{role} {verb}")  # noqa: B023
        assert may(server, role, "get", "status") and may(server, role, "get", "scale")
        assert may(server, role, "update", "scale") == (role != "view")
        assert not may(server, role, "update", "status"), "the status is the operator's alone"


def bind(server: ApiServer, namespace: str, role: str) -> None:
    """Give a user that is named after it one of Kubernetes' own roles."""
    group = "rbac.authorization.k8s.io"
    body = {
        "metadata": {"name": role},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": group, "kind": "User", "name": f"{role}-user"}],
    }
    server.request("POST", f"{RIGHTS}/namespaces/{namespace}/rolebindings", body)


def may(server: ApiServer, role: str, verb: str, subresource: str) -> bool:
    """Ask the API server's authorizer."""
    asked = {
        "namespace": "people",
        "verb": verb,
        "group": contract.API_GROUP,
        "resource": "inferenceservices",
        "subresource": subresource,
    }
    body = {"spec": {"user": f"{role}-user", "resourceAttributes": asked}}
    answer = server.request("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", body)
    return bool(answer["status"]["allowed"])


def test_helm_test_tells_a_working_operator_from_a_broken_one(
    plane: ControlPlane, helm: Helm, runner: HookRunner, server: ApiServer, tmp_path: Path
) -> None:
    make_namespaces(server, "team-c")
    for manifest in (MANIFEST, ADAPTERS):
        server.install(manifest)
    values = ["watchNamespaces={team-c}", "replicas=2", "crd.install=false"]
    helm.install(*values)
    release = Installation(server, plane.kubeconfig, helm.render(*values))
    with release.operator(tmp_path, "operator") as operator:
        page = f"http://127.0.0.1:{operator.metrics_port}"
        runner.substitutes[f"http://skiff-operator-metrics.{NAMESPACE}:9090"] = page
        helm.run("test", "skiff", "--namespace", NAMESPACE)
        assert runner.outputs[-1].count("ok: ") == 2
        bindings = f"{RIGHTS}/namespaces/team-c/rolebindings"
        server.request("DELETE", f"{bindings}/skiff:{NAMESPACE}:skiff-operator")
        with pytest.raises(HelmError):
            helm.run("test", "skiff", "--namespace", NAMESPACE)
        assert "forbidden" in runner.outputs[-1] and "ok: " not in runner.outputs[-1]
