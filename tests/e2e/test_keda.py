"""The autoscaling engine KEDA with KEDA itself: by the pods' load between one pod and more, and by the router's from zero.

KEDA's operator and its API server of external metrics are the real ones, built from their Go module. They run beside a real API
server, whose controllers include the HorizontalPodAutoscaler's, and a real Prometheus, which scrapes a real runtime. There are
no nodes: what is scaled are the pods that shall be. The test takes the part of the router: its gauge, and its patch of `scale`.
"""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml
from apiserver import COLLECTIONS, ApiServer, Refused
from controlplane import ControlPlane, is_free
from helm import Helm
from installation import Installation
from operator_process import eventually
from paths import layout
from pki import Authority
from prometheus import Prometheus, running
from prometheus_client import CollectorRegistry, Gauge, start_http_server
from service import Service, running_service
from toolchain import keda as keda_programs

from skiff_runtime.contract import METRIC_IN_FLIGHT, ROUTER_METRIC_WAITING

ROOT: Final = Path(__file__).parents[2]
NAMESPACE: Final = "scaled"
KEDA_NAMESPACE: Final = "keda"
SCALE_SECONDS: Final = 240
"""KEDA polls every 30 s, and its queries look back a minute."""
LOAD: Final = 8
TARGET: Final = 2
MODEL: Final = "sleeper"
API_SERVICES: Final = "/apis/apiregistration.k8s.io/v1/apiservices"
METRICS_API: Final = "v1beta1.external.metrics.k8s.io"
pytestmark = pytest.mark.keda

NAMESPACED: Final = "/apis/{group}/namespaces/{{namespace}}/{plural}"
for group, plural in (("autoscaling/v2", "horizontalpodautoscalers"), ("keda.sh/v1alpha1", "scaledobjects")):
    COLLECTIONS[plural] = NAMESPACED.format(group=group, plural=plural)


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    """A control plane whose HorizontalPodAutoscalers are looked at every second."""
    with ControlPlane(manager_flags=["--horizontal-pod-autoscaler-sync-period=1s"]) as plane:
        yield plane


@pytest.fixture(scope="module")
def api(plane: ControlPlane) -> ApiServer:
    """The test's namespace of an API server with the definitions of Skiff and KEDA."""
    server = ApiServer(plane.kubeconfig, NAMESPACE)
    for definition in sorted((ROOT / "manifests/crds").glob("*.yaml")):
        server.install(definition)
    _, _, definitions = keda_programs(layout())
    for definition in sorted(definitions.glob("*.yaml")):
        server.install(definition)
    server.create_namespace()
    eventually(lambda: is_served(server, "inferenceservices"), "InferenceServices are served")
    eventually(lambda: is_served(server, "scaledobjects"), "ScaledObjects are served")
    plane.restart("kube-controller-manager")  # it looks for new kinds every 30 s only, and when it starts
    return server


def is_served(server: ApiServer, plural: str) -> bool:
    """Return whether a kind is served."""
    try:
        return server.list(plural) == []
    except Refused:
        return False


@contextmanager
def program(command: list[str], environment: dict[str, str], log: Path) -> Iterator[None]:
    """Run a program until the end of the block, and print the end of its log then."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield
        assert process.poll() is None, f"{log.stem} has ended"
    finally:
        process.kill()
        process.wait()
        print(log.read_text()[-8000:])


@pytest.fixture(scope="module")
def keda(plane: ControlPlane, api: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """KEDA, whose metrics the API server serves: an ExternalName leads there, because nothing routes to Services."""
    operator, adapter, _ = keda_programs(layout())
    folder = tmp_path_factory.mktemp("keda")
    authority = Authority(folder / "certificates")
    authority.create()
    authority.issue("tls", "/CN=keda-operator", "DNS:localhost,IP:127.0.0.1")
    free = [each for each in range(22_000, 23_000) if is_free(each)]
    grpc, operator_metrics, probe, serving, adapter_metrics = free[:5]
    kubeconfig = str(plane.kubeconfig)
    environment = {
        "KUBECONFIG": kubeconfig,
        "WATCH_NAMESPACE": "",
        "POD_NAMESPACE": KEDA_NAMESPACE,
        "KEDA_CLUSTER_OBJECT_NAMESPACE": KEDA_NAMESPACE,
    }
    operator_command = [
        str(operator),
        f"--metrics-bind-address=127.0.0.1:{operator_metrics}",
        f"--health-probe-bind-address=127.0.0.1:{probe}",
        f"--metrics-service-bind-address=127.0.0.1:{grpc}",
        f"--cert-dir={authority.directory}",
        "--enable-cert-rotation=false",
    ]
    adapter_command = [
        str(adapter),
        "--bind-address=127.0.0.1",
        f"--secure-port={serving}",
        f"--port={adapter_metrics}",
        f"--metrics-service-address=127.0.0.1:{grpc}",
        f"--cert-dir={authority.directory}",
        f"--tls-cert-file={authority.path('tls', 'crt')}",
        f"--tls-private-key-file={authority.path('tls', 'key')}",
        *(f"--{name}-kubeconfig={kubeconfig}" for name in ("lister", "authentication", "authorization")),
    ]
    where = api.in_namespace(KEDA_NAMESPACE)
    where.create_namespace()
    name = "keda-metrics-apiserver"
    spec: dict[str, Any] = {"type": "ExternalName", "externalName": "localhost"}
    where.create("services", {"metadata": {"name": name}, "spec": spec})
    registration = {
        "metadata": {"name": METRICS_API},
        "spec": {
            "service": {"namespace": KEDA_NAMESPACE, "name": name, "port": serving},
            "group": "external.metrics.k8s.io",
            "version": "v1beta1",
            "insecureSkipTLSVerify": True,
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
        },
    }

    def has_metrics() -> bool:
        found = api.request("GET", f"{API_SERVICES}/{METRICS_API}").get("status", {}).get("conditions", [])
        return any(each["type"] == "Available" and each["status"] == "True" for each in found)

    with ExitStack() as stack:
        stack.enter_context(program(operator_command, environment, folder / "operator.log"))
        stack.enter_context(program(adapter_command, environment, folder / "adapter.log"))
        api.request("POST", API_SERVICES, registration)
        eventually(has_metrics, "the metrics of KEDA are served")
        yield


@pytest.fixture(scope="module")
def runtime() -> Iterator[Service]:
    """The runtime that Prometheus takes for the pods of the service `loaded`. Of its requests one runs, and the others wait."""
    with running_service("demo://", "--max-running-requests", "1") as service:
        yield service


@pytest.fixture(scope="module")
def waiting() -> Iterator[tuple[int, Gauge]]:
    """The router's gauge of waiting requests, and the port at which it is scraped."""
    registry = CollectorRegistry()
    gauge = Gauge(ROUTER_METRIC_WAITING, "Requests that wait for a pod.", ("model",), registry=registry)
    gauge.labels(MODEL).set(0)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    yield server.server_port, gauge
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def prometheus(
    runtime: Service, waiting: tuple[int, Gauge], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Prometheus with the labels that the chart's PodMonitors give."""
    folder = tmp_path_factory.mktemp("prometheus")
    rules = folder / "rules.yaml"
    rules.write_text(yaml.safe_dump({"groups": []}))
    port = httpx.URL(runtime.url).port
    assert port is not None
    jobs = {
        "serving": (port, {"namespace": NAMESPACE, "inferenceservice": "loaded"}),
        "router": (waiting[0], {"namespace": "skiff-system"}),
    }
    with running(folder, jobs, rules) as server:
        yield server


@pytest.fixture(scope="module")
def operator(
    plane: ControlPlane,
    api: ApiServer,
    keda: None,
    prometheus: Prometheus,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[None]:
    """Skiff's operator with the rights that the chart gives it."""
    values = (
        f"watchNamespaces={{{NAMESPACE}}}",
        "autoscaling.engines={KEDA}",
        f"autoscaling.prometheusAddress={prometheus.url}",
    )
    installed = Installation(api, plane.kubeconfig, Helm().render(*values, namespace=NAMESPACE))
    installed.apply()
    process = installed.operator(
        tmp_path_factory.mktemp("operator"), "operator", "--status-delay-seconds", "0.1"
    )
    process.start()
    yield
    process.end()


def create(api: ApiServer, name: str, replicas: int, **autoscaling: Any) -> None:
    """Create an InferenceService that KEDA scales by its requests in flight, and wait until KEDA has accepted it."""
    policy = {
        "engine": "KEDA",
        "targets": {"concurrency": TARGET},
        "scaleDownDelaySeconds": 0,
        **autoscaling,
    }
    spec = {
        "model": {"uri": "demo://"},
        "runtime": {"device": "cpu"},
        "replicas": replicas,
        "autoscaling": policy,
    }
    body = {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": spec,
    }
    api.create("inferenceservices", body)

    def is_accepted() -> bool:
        conditions = (api.find("scaledobjects", name) or {}).get("status", {}).get("conditions", [])
        return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)

    eventually(is_accepted, "KEDA accepts the ScaledObject")


def replicas(api: ApiServer, name: str) -> int:
    """Return the number of pods that shall be."""
    number: int = api.get("inferenceservices", name, "scale")["spec"].get("replicas", 0)
    return number


def wait_for_replicas(api: ApiServer, name: str, number: int) -> None:
    """Wait until this many pods shall be."""
    eventually(lambda: replicas(api, name) == number, f"{number} replicas", SCALE_SECONDS, every_seconds=0.5)


@contextmanager
def load(url: str) -> Iterator[None]:
    """Keep LOAD requests in flight until the end of the block."""
    ended = threading.Event()
    body = {"model": "skiff-demo", "prompt": "What is a pod?", "max_tokens": 32, "ignore_eos": True}
    failures: list[str] = []

    def ask() -> None:
        with httpx.Client(timeout=60) as client:
            while not ended.is_set():
                reply = client.post(f"{url}/v1/completions", json=body)
                if reply.status_code != 200:
                    failures.append(reply.text)
                    return

    threads = [threading.Thread(target=ask) for _ in range(LOAD)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert not failures, failures[0]


def test_load_adds_pods_and_its_end_removes_them(
    api: ApiServer, operator: None, runtime: Service, prometheus: Prometheus
) -> None:
    create(api, "loaded", 1, maxReplicas=LOAD // TARGET)
    with load(runtime.url):
        eventually(
            lambda: any(float(each["value"][1]) > TARGET for each in prometheus.query(METRIC_IN_FLIGHT)),
            "Prometheus sees the load",
        )
        wait_for_replicas(api, "loaded", LOAD // TARGET)
    wait_for_replicas(api, "loaded", 1)


def test_a_pod_that_the_router_asked_for_stays_while_it_loads_and_goes_when_it_is_idle(
    api: ApiServer, operator: None, prometheus: Prometheus, waiting: tuple[int, Gauge]
) -> None:
    """KEDA notes the time of each poll that found activity; a pod without metrics of its own survives two of them."""
    create(api, MODEL, 0, minReplicas=0, maxReplicas=2, scaleToZeroAfterSeconds=1)
    gauge = waiting[1].labels(MODEL)
    gauge.set(1)
    query = f'{ROUTER_METRIC_WAITING}{{model="{MODEL}"}} == 1'
    eventually(lambda: bool(prometheus.query(query)), "Prometheus sees the request that waits")
    api.merge("inferenceservices", MODEL, {"spec": {"replicas": 1}}, "scale")
    polls: set[str] = set()

    def has_polled_again() -> bool:
        assert replicas(api, MODEL) == 1, f"KEDA removed the pod; polls that found activity: {polls}"
        active = api.get("scaledobjects", MODEL).get("status", {}).get("lastActiveTime")
        if active:
            polls.add(active)
        return len(polls) >= 3

    eventually(has_polled_again, "three polls", SCALE_SECONDS, every_seconds=0.5)
    gauge.set(0)
    wait_for_replicas(api, MODEL, 0)


def test_another_engine_removes_what_keda_made(api: ApiServer, operator: None) -> None:
    create(api, "leaving", 2, maxReplicas=3, minReplicas=2)
    eventually(lambda: api.find("horizontalpodautoscalers", "keda-hpa-leaving"), "KEDA's own object")
    api.merge("inferenceservices", "leaving", {"spec": {"autoscaling": None}})
    eventually(lambda: api.find("scaledobjects", "leaving") is None, "the ScaledObject goes")
    eventually(
        lambda: api.find("horizontalpodautoscalers", "keda-hpa-leaving") is None,
        "and so does KEDA's own object",
    )
    assert replicas(api, "leaving") == 2
