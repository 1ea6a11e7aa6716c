"""The Gateway API's endpoint picker in front of Skiff pods: it reads their metrics, and sends equal prefixes to one pod.

The picker is the real one, built from its Go module. It watches a real API server, which has its definitions, the InferencePool
that the operator builds, and two pods; behind the addresses of these run two real runtimes. The test takes the part of the
gateway, which asks the picker by Envoy's external processing protocol.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from apiserver import COLLECTIONS, ApiServer, Refused
from controlplane import ControlPlane, is_free
from ext_proc import NotPicked, pick
from kube import wait
from paths import layout
from play_kubelet import TIME
from prometheus_client.parser import text_string_to_metric_families
from service import running_service
from services import service
from toolchain import endpoint_picker

from skiff_operator import plan
from skiff_operator.kinds import INFERENCE_POOL
from skiff_operator.settings import Settings
from skiff_runtime.contract import API_PORT

NAMESPACE: Final = "pools"
ADDRESSES: Final = ("127.0.0.2", "127.0.0.3")
PAGE_SIZE: Final = 32
"""Not the picker's default, so that it is seen to read the block size from the pods."""
CHARACTERS_PER_TOKEN: Final = 4
"""The length of a token that the picker assumes."""
CONFIG: Final = """\
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
- type: prefix-cache-scorer
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: queue-scorer, weight: 2}
  - {pluginRef: kv-cache-utilization-scorer, weight: 2}
  - {pluginRef: prefix-cache-scorer, weight: 3}
"""
pytestmark = pytest.mark.picker

COLLECTIONS["inferencepools"] = "/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools"


@pytest.fixture(scope="module")
def api() -> Iterator[tuple[ApiServer, Path]]:
    """An API server with the definitions of the picker's module and the pool of an InferenceService, and its kubeconfig."""
    _, module = endpoint_picker(layout())
    with ControlPlane() as plane:
        server = ApiServer(plane.kubeconfig, NAMESPACE)
        server.create_namespace()
        for definition in sorted((module / "config/crd/bases").glob("*.yaml")):
            server.install(definition)
        objects = plan.objects(service(inferencePool={"enabled": True}), Settings(inference_pools=True))
        pool = objects[(INFERENCE_POOL, "llama")]
        pool["metadata"]["namespace"] = NAMESPACE
        del pool["metadata"]["ownerReferences"]  # the InferenceService is not in this API server
        wait(lambda: _is_created(server, pool), timeout_seconds=60)
        yield server, plane.kubeconfig


def _is_created(server: ApiServer, pool: dict[str, Any]) -> bool:
    """Create the pool; False while its definition is not served yet."""
    try:
        server.create("inferencepools", pool)
    except Refused as error:
        assert error.status == 404, error
        return False
    return True


def make_pod(server: ApiServer, name: str, address: str) -> None:
    """Make a ready pod of the InferenceService, at an address of the loopback interface."""
    body = {
        "metadata": {"name": name, "labels": {"serving.skiff.dev/inferenceservice": "llama"}},
        "spec": {
            "automountServiceAccountToken": False,
            "containers": [{"name": "runtime", "image": "skiff-runtime"}],
        },
    }
    wait(lambda: server.find("serviceaccounts", "default") is not None, timeout_seconds=30)
    server.create("pods", body)
    status = {
        "phase": "Running",
        "podIP": address,
        "podIPs": [{"ip": address}],
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": TIME}],
    }
    server.merge("pods", name, {"status": status}, "status")


@pytest.fixture(scope="module")
def pods(api: tuple[ApiServer, Path]) -> Iterator[None]:
    """Two runtimes behind two pods."""
    with ExitStack() as stack:
        for number, address in enumerate(ADDRESSES):
            flags = ("--host", address, "--port", str(API_PORT), "--page-size", str(PAGE_SIZE))
            stack.enter_context(running_service("demo://", *flags, "--metrics-names", "skiff,vllm"))
            make_pod(api[0], f"llama-{number}", address)
        yield


class Picker:
    """The running picker. `port`: of its protocol; `metrics_port`: of its own metrics."""

    def __init__(self, port: int, metrics_port: int) -> None:
        self.port = port
        self._metrics_port = metrics_port

    def pick(self, prompt: str) -> str:
        """Return the address and port of the pod that a completion of this prompt goes to."""
        return pick(self.port, "/v1/completions", {"model": "llama", "prompt": prompt, "max_tokens": 1})

    def metric(self, name: str) -> float:
        """Return the value of a metric that has at most one series, whatever its labels are; 0 if it has none."""
        page = httpx.get(f"http://127.0.0.1:{self._metrics_port}/metrics").raise_for_status().text
        samples = [each for family in text_string_to_metric_families(page) for each in family.samples]
        return sum(each.value for each in samples if each.name == name)


@pytest.fixture(scope="module")
def picker(
    api: tuple[ApiServer, Path], pods: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Picker]:
    program, _ = endpoint_picker(layout())
    port, health_port, metrics_port = [each for each in range(21_000, 22_000) if is_free(each)][:3]
    log = tmp_path_factory.mktemp("picker") / "log"
    command = [
        str(program),
        "--pool-name=llama",
        f"--pool-namespace={NAMESPACE}",
        f"--grpc-port={port}",
        f"--grpc-health-port={health_port}",
        f"--metrics-port={metrics_port}",
        "--metrics-endpoint-auth=false",
        "--refresh-prometheus-metrics-interval=100ms",
        "--tracing=false",
        "--secure-serving=false",
        f"--config-text={CONFIG}",
    ]
    with log.open("wb") as output:
        environment = {**os.environ, "KUBECONFIG": str(api[1])}
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    running = Picker(port, metrics_port)

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return running.metric("inference_pool_ready_pods") == len(ADDRESSES)
        except httpx.HTTPError:
            return False

    try:
        wait(is_ready, timeout_seconds=60, explain=log.read_text, poll_seconds=0.1)
        yield running
    finally:
        process.kill()
        process.wait()


def test_equal_prefixes_go_to_one_pod(picker: Picker) -> None:
    for number in range(8):
        head = f"Group {number}. " + f"The {number} boats of the harbour sail at noon. " * 20
        first = picker.pick(head + "Where to?")
        assert first in {f"{address}:{API_PORT}" for address in ADDRESSES}
        assert [picker.pick(head + rest) for rest in ("Why?", "How far?", "With whom?")] == [first] * 3


def test_block_size_is_read_from_the_pods(picker: Picker) -> None:
    """Two prompts share 200 characters: one block of 32 tokens, where blocks of the default size would be three."""
    name = "inference_extension_prefix_indexer_hit_bytes_sum"
    head = "On the ninth day the harbour master counted every boat again, " * 4
    picker.pick(head[:200] + "a" * 100)
    before = picker.metric(name)
    picker.pick(head[:200] + "b" * 100)
    assert picker.metric(name) - before == PAGE_SIZE * CHARACTERS_PER_TOKEN


def test_body_without_a_model_is_refused(picker: Picker) -> None:
    with pytest.raises(NotPicked):
        pick(picker.port, "/v1/completions", {"prompt": "The boat"})
