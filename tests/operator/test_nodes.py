"""Capacity of the nodes, listed from a real API server: labels, cordons, other resources, rights that are missing."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from apiserver import MERGE, ApiServer
from controlplane import ControlPlane
from kubernetes.aio import config
from kubernetes.aio.client.configuration import Configuration
from operator_process import eventually
from services import service

from skiff_operator import metrics
from skiff_operator.client import Client
from skiff_operator.nodes import Nodes
from skiff_operator.settings import Settings
from skiff_operator.spec import InferenceService

NODES = "/api/v1/nodes"
GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-3g.40gb"


@pytest.fixture(scope="module")
def nodes(server: ApiServer) -> Iterator[None]:
    """Three nodes: 8 GPUs in one pool, 4 and some slices in another, 16 on one that is cordoned."""
    shapes: list[tuple[str, str, dict[str, str], bool]] = [
        ("large", "a", {GPU: "8", "cpu": "64"}, False),
        ("small", "b", {GPU: "4", MIG: "2"}, False),
        ("cordoned", "a", {GPU: "16"}, True),
    ]
    for name, pool, amounts, cordoned in shapes:
        body = {"metadata": {"name": name, "labels": {"pool": pool}}, "spec": {"unschedulable": cordoned}}
        server.request("POST", NODES, body)
        status = {"status": {"allocatable": amounts, "capacity": amounts}}
        server.request("PATCH", f"{NODES}/{name}/status", status, kind=MERGE)
    yield
    for name, *_ in shapes:
        server.request("DELETE", f"{NODES}/{name}")


def shortages(kubeconfig: Path, *wanted: InferenceService) -> tuple[list[str], float]:
    """Ask for the shortage of all services at the same time; the answers, and how many requests they took."""

    async def ask() -> list[str]:
        credentials = Configuration()
        await config.load_kube_config(str(kubeconfig), client_configuration=credentials)
        client = Client(credentials, connections=2)
        found = Nodes(client, Settings())
        try:
            return await asyncio.gather(*[found.shortage(each) for each in wanted])
        finally:
            await client.close()

    before = _requests()
    return asyncio.run(ask()), _requests() - before


def _requests() -> float:
    return sum(sample.value for family in metrics.api_requests.collect() for sample in family.samples)


def gpus(tensor: int, **fields: Any) -> InferenceService:
    """Build a service of `tensor` ranks."""
    return service(parallelism={"tensor": tensor}, **fields)


@pytest.mark.usefixtures("nodes")
def test_the_largest_schedulable_node_counts(plane: ControlPlane) -> None:
    in_b: dict[str, Any] = {"nodeSelector": {"pool": "b"}}
    answers, lists = shortages(
        plane.kubeconfig,
        gpus(8),
        gpus(9),
        gpus(4, **in_b),
        gpus(5, **in_b),
        gpus(5, podTemplate={"spec": in_b}),
        gpus(5, **in_b, podTemplate={"spec": {"nodeSelector": None}}),
        gpus(2, runtime={"gpuResourceName": MIG}),
        gpus(3, runtime={"gpuResourceName": MIG}),
        gpus(64, runtime={"device": "cpu"}),
    )
    selected = f"no schedulable node that nodeSelector allows has 5 {GPU}; the largest has 4"
    assert answers == [
        "",
        f"no schedulable node has 9 {GPU}; the largest has 8",
        "",
        selected,
        selected,
        "",
        "",
        f"no schedulable node has 3 {MIG}; the largest has 2",
        "",
    ]
    assert lists == 1


@pytest.mark.usefixtures("nodes")
def test_without_the_right_nothing_is_reported(
    server: ApiServer, plane: ControlPlane, tmp_path: Path
) -> None:
    eventually(lambda: server.find("serviceaccounts", "default"), "the default account")
    path = server.path("serviceaccounts", "default", "token")
    token = server.request("POST", path, {"spec": {"expirationSeconds": 3600}})["status"]["token"]
    content = yaml.safe_load(plane.kubeconfig.read_text())
    content["users"][0]["user"] = {"token": token}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(json.dumps(content))
    answers, lists = shortages(kubeconfig, gpus(64), gpus(64))
    assert answers == ["", ""]
    assert lists == 1, "a refusal is remembered, too"
