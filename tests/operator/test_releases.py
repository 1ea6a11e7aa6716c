"""Releases of the chart on a real API server, by the real helm: side by side, one after the other, and upgraded."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from apiserver import ApiServer
from controlplane import ControlPlane
from helm import Helm
from hook_runner import HookRunner

from skiff_runtime import contract

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
CRD = f"{CRDS}/inferenceservices.serving.skiff.dev"
HOOKS = "app.kubernetes.io/component=hook"


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane of this file's own, for its CRD comes and goes."""
    with ControlPlane() as plane:
        yield plane


@pytest.fixture(scope="module")
def helm(plane: ControlPlane) -> Iterator[Helm]:
    """Helm, whose hooks run here."""
    with HookRunner(ApiServer(plane.kubeconfig), plane.kubeconfig, HOOKS):
        yield Helm(plane.kubeconfig)


@pytest.fixture
def server(plane: ControlPlane, helm: Helm) -> Iterator[ApiServer]:
    """The API server; afterwards without releases and without the CRD."""
    server = ApiServer(plane.kubeconfig)
    yield server
    for release in json.loads(helm.run("list", "--all-namespaces", "--output", "json")):
        helm.uninstall(release["name"], release["namespace"])
    for body in server.request("GET", CRDS)["items"]:
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
    make_namespaces(server, "models")
    helm.install(release="first", namespace="one")
    made = create_service(server, "models")
    helm.uninstall("first", "one")
    helm.install(release="second", namespace="two")
    helm.upgrade("workers=4", release="second", namespace="two")
    helm.uninstall("second", "two")
    found = server.in_namespace("models").get("inferenceservices", "llama")
    assert found["metadata"]["uid"] == made["metadata"]["uid"], "no InferenceService goes with a release"


def test_releases_of_one_name_stand_side_by_side(helm: Helm, server: ApiServer) -> None:
    make_namespaces(server, "team-a", "team-b")
    helm.install("watchNamespaces={team-a}", namespace="system-a")
    helm.install("watchNamespaces={team-b}", namespace="system-b")
    helm.upgrade("watchNamespaces={team-a}", "workers=4", namespace="system-a")
    helm.upgrade("watchNamespaces={team-b}", "workers=4", namespace="system-b")
    helm.uninstall(namespace="system-a")
    create_service(server, "team-b")


def test_releases_that_watch_everything_do_not_share_a_name(helm: Helm, server: ApiServer) -> None:
    """Neither do namespace and release that are one text when a dash joins them."""
    helm.install(release="b-c", namespace="a")
    helm.install(release="c", namespace="a-b")
