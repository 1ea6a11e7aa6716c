"""The operator with pods that become Ready: thousands of InferenceServices on fake nodes.

    python tests/operator/bench/bench_ready_pods.py [--sizes 1000,5000] [--json FILE]

For each size a fresh control plane with its controllers, a scheduler and kwok in place of the kubelets: a burst of
creations until every InferenceService is Ready, then a restart of the operator. CPU, memory and requests are the
operator's; times are those of the whole control plane on this machine.
"""

import asyncio
import dataclasses
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2] / folder) for folder in ("support", "cluster")]

import bench_operator  # noqa: E402
from apiserver import ApiServer  # noqa: E402
from bench_operator import CRDS, NAMESPACE, cpu_seconds, settle  # noqa: E402
from controlplane import ControlPlane  # noqa: E402
from creation_load import create_all  # noqa: E402
from fake_nodes import MANAGER_FLAGS, FakeNodes  # noqa: E402
from operator_process import OperatorProcess  # noqa: E402

PODS_PER_NODE = 250
READY_SECONDS = 3_600.0
LOOK_SECONDS = 10.0


@dataclasses.dataclass
class Result:
    """One size's measurements."""

    objects: int
    ready_seconds: float = 0.0
    cpu_ms_per_object: float = 0.0
    requests_per_object: float = 0.0
    resident_mib: float = 0.0
    restart_cpu_seconds: float = 0.0
    restart_writes: int = 0
    restart_resident_mib: float = 0.0


def measure(size: int, scratch: Path) -> Result:
    """All measurements of one size."""
    result = Result(size)
    plane = ControlPlane(manager_flags=MANAGER_FLAGS)
    plane.start()
    try:
        server = ApiServer(plane.kubeconfig, NAMESPACE)
        for definition in CRDS:
            server.install(definition)
        server.create_namespace()
        kubeconfig = bench_operator.install(server, plane.kubeconfig).kubeconfig(
            scratch / f"operator-{size}.kubeconfig"
        )
        log = scratch / f"operator-{size}.log"
        with (
            FakeNodes(plane, size // PODS_PER_NODE + 1),
            OperatorProcess(kubeconfig, log, forked=False) as operator,
        ):
            time.sleep(3.0)
            burst(plane.kubeconfig, operator, result)
            restart(operator, result)
    finally:
        plane.stop()
    return result


def burst(kubeconfig: Path, operator: OperatorProcess, result: Result) -> None:
    """Create everything as fast as the API server takes it; until all of it is Ready."""
    cpu, requests = cpu_seconds(operator), sum(operator.requests().values())
    names = [f"burst-{number:04d}" for number in range(result.objects)]
    started = time.perf_counter()
    asyncio.run(create_all(kubeconfig, NAMESPACE, names, rate=None))
    settle(operator, result.objects, ready="True", timeout_seconds=READY_SECONDS, every_seconds=LOOK_SECONDS)
    result.ready_seconds = time.perf_counter() - started
    result.cpu_ms_per_object = (cpu_seconds(operator) - cpu) * 1e3 / result.objects
    result.requests_per_object = (sum(operator.requests().values()) - requests) / result.objects
    result.resident_mib = operator.process.memory_info().rss / 2**20


def restart(operator: OperatorProcess, result: Result) -> None:
    """Measure a restart as `bench_operator` does, and the memory afterwards."""
    measured = bench_operator.Result(result.objects)
    bench_operator.restart(operator, measured, ready="True")
    result.restart_cpu_seconds = measured.restart_cpu_seconds
    result.restart_writes = measured.restart_writes
    result.restart_resident_mib = operator.process.memory_info().rss / 2**20


def table(results: list[Result]) -> str:
    """The results as a Markdown table."""
    heads = ["measure", *(f"{result.objects:,}" for result in results)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for field in dataclasses.fields(Result)[1:]:
        values = [f"{getattr(result, field.name):.1f}" for result in results]
        lines.append(f"| {field.name.replace('_', ' ')} | {' | '.join(values)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    bench_operator.run(__doc__, "1000,5000", measure, table)
