"""A real API server, etcd and controller manager for the session, and an operator for each module that needs one.

Every operator runs as its own ServiceAccount under the roles of the chart or of manifests/operator, so a verb that is
missing there fails a test here. There are no nodes: tests play the kubelet.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from apiserver import ApiServer, Refused
from helm import Helm
from installation import Installation, raw_manifests
from operator_process import OperatorProcess, eventually

from skiff_operator.cli.main import main

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests/cluster"))

from controlplane import ControlPlane  # noqa: E402

CRD = ROOT / "manifests/crds/inferenceservices.yaml"
OTHER_CRDS = [ROOT / f"manifests/crds/{name}.yaml" for name in ("loraadapters", "modelcaches")]
Start = Callable[..., OperatorProcess]
RunCommand = Callable[..., tuple[int, str]]


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    """The control plane; where its programs cannot be built, every test that needs it fails with the reason."""
    plane = ControlPlane(audit=True)
    plane.start()
    yield plane
    plane.stop()


@pytest.fixture(scope="session")
def server(plane: ControlPlane) -> ApiServer:
    """The API server with the CRD.

    The garbage collector looks for new kinds every 30 s only, and when it starts: so it is started again.
    """
    server = ApiServer(plane.kubeconfig)
    server.install(CRD)
    for each in OTHER_CRDS:
        server.install(each)
    eventually(lambda: _served(server), "the CRDs are served")
    plane.restart("kube-controller-manager")
    return server


@pytest.fixture(scope="session")
def installation(server: ApiServer, plane: ControlPlane) -> Installation:
    """Install what `kubectl apply -k manifests` makes: an operator of all namespaces."""
    installed = Installation(server, plane.kubeconfig, raw_manifests())
    installed.apply()
    return installed


@pytest.fixture(scope="session")
def operator_kubeconfig(installation: Installation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kubeconfig with a token of that operator's ServiceAccount."""
    return installation.kubeconfig(tmp_path_factory.mktemp("operator") / "kubeconfig")


@pytest.fixture(scope="module")
def operator(
    installation: Installation, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    """A running operator of all namespaces that leads."""
    folder = tmp_path_factory.mktemp("operator")
    with installation.operator(folder, "operator", "--status-delay-seconds", "0.1") as process:
        yield process
        tracebacks = [line for line in process.log.read_text().splitlines() if '"traceback"' in line]
        assert not tracebacks, tracebacks


@pytest.fixture
def start(api: ApiServer, server: ApiServer, plane: ControlPlane, tmp_path: Path) -> Iterator[Start]:
    """Make operators of one release in the test's own namespace that serve it alone; all are stopped in the end."""
    values = f"watchNamespaces={{{api.namespace}}}"
    installed = Installation(server, plane.kubeconfig, Helm().render(values, namespace=api.namespace))
    installed.apply()
    with contextlib.ExitStack() as stack:

        def make(identity: str, *flags: str) -> OperatorProcess:
            process = installed.operator(tmp_path, identity, "--status-delay-seconds", "0.1", *flags)
            stack.callback(process.end)
            return process

        yield make


@pytest.fixture
def api(server: ApiServer, request: pytest.FixtureRequest) -> ApiServer:
    """A namespace of the test's own, under the restricted Pod Security level."""
    name = re.sub("[^a-z0-9]+", "-", request.node.name.lower())[:60].strip("-")
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    server.request("POST", "/api/v1/namespaces", {"metadata": {"name": name, "labels": labels}})
    return server.in_namespace(name)


def _served(server: ApiServer) -> bool:
    try:
        return server.list("inferenceservices") == server.list("loraadapters") == []
    except Refused:
        return False


@pytest.fixture
def skiff(api: ApiServer, plane: ControlPlane, capsys: pytest.CaptureFixture[str]) -> RunCommand:
    """Run `skiff rollout ACTION llama` in the namespace of the test: its exit code and its output."""

    def run(action: str, *words: str) -> tuple[int, str]:
        where = ["--kubeconfig", str(plane.kubeconfig), "--namespace", api.namespace]
        code = main(["rollout", action, "llama", *words, *where], "skiff")
        said = capsys.readouterr()
        return code, said.out + said.err

    return run
