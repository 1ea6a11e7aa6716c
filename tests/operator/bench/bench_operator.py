"""The operator under load: 1, 100 and 1,000 InferenceServices on a real API server and etcd.

    python tests/operator/bench/bench_operator.py [--sizes 1,100,1000] [--json FILE]

For each size a fresh control plane (without the controller manager, whose work is not the operator's) and a fresh
operator process: a burst of creations, a restart, a minute of nothing, then creations at a steady rate.
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[2] / folder) for folder in ("support", "cluster")]

from apiserver import ApiServer  # noqa: E402
from controlplane import ControlPlane  # noqa: E402
from creation_load import DeploymentWatch, create_all  # noqa: E402
from installation import Installation, raw_manifests  # noqa: E402
from operator_process import OperatorProcess, eventually  # noqa: E402

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

ResultOfSize = TypeVar("ResultOfSize", bound="DataclassInstance")
CRDS = sorted((HERE.parents[3] / "manifests/crds").glob("*.yaml"))
NAMESPACE = "bench"
STEADY_RATE = 16.0
STEADY_SECONDS = 15.0
IDLE_SECONDS = 60.0
QUIET_CPU_SECONDS = 0.03
"""An operator that uses no more than this in a second has nothing to do."""
TARGETS = {
    "last_deployment_seconds": 6.0,
    "steady_p95_ms": 25.0,
    "cpu_ms_per_object": 5.0,
    "requests_per_object": 5.0,
    "resident_mib": 100.0,
    "restart_cpu_seconds": 2.0,
    "restart_writes": 0.0,
    "idle_requests_per_minute": 6.0,
}
"""Targets at 1,000 objects. The requests of an object are the creations of its ServiceAccount, ControllerRevision,
Deployment and Service, and its status; the idle requests are the Lease's, one each 10 s."""


@dataclasses.dataclass
class Result:
    """One size's measurements; CPU and memory are the operator's."""

    objects: int
    last_deployment_seconds: float = 0.0
    steady_p50_ms: float = 0.0
    steady_p95_ms: float = 0.0
    cpu_ms_per_object: float = 0.0
    requests_per_object: float = 0.0
    resident_mib: float = 0.0
    restart_cpu_seconds: float = 0.0
    restart_writes: int = 0
    idle_requests_per_minute: float = 0.0
    idle_cpu_ms_per_second: float = 0.0


def cpu_seconds(operator: OperatorProcess) -> float:
    """CPU that the process has used."""
    times = operator.process.cpu_times()
    used: float = times.user + times.system
    return used


def settle(
    operator: OperatorProcess,
    total: int,
    *,
    ready: str = "False",
    timeout_seconds: float = 180.0,
    every_seconds: float = 1.0,
) -> None:
    """Wait until every object has its status, with `ready` as its condition Ready, and nothing is queued.

    Each look costs the operator a scrape: 8 ms of CPU for a thousand objects.
    """

    def settled() -> bool:
        values = operator.metrics()
        known = values[f"skiff_operator_objects{{condition=Ready,status={ready}}}"]
        return known == total and values["skiff_operator_queue_depth"] == 0

    eventually(settled, f"{total} statuses written", timeout_seconds, every_seconds=every_seconds)
    time.sleep(1.0)


def burst(kubeconfig: Path, operator: OperatorProcess, result: Result) -> None:
    """Create everything as fast as the API server takes it; until the last Deployment exists."""
    cpu, requests = cpu_seconds(operator), sum(operator.requests().values())
    names = [f"burst-{number:04d}" for number in range(result.objects)]

    async def run() -> float:
        async with DeploymentWatch(kubeconfig, NAMESPACE) as watch:
            started = time.perf_counter()
            await create_all(kubeconfig, NAMESPACE, names, rate=None)
            return max((await watch.wait_for(names)).values()) - started

    result.last_deployment_seconds = asyncio.run(run())
    settle(operator, result.objects)
    result.cpu_ms_per_object = (cpu_seconds(operator) - cpu) * 1e3 / result.objects
    result.requests_per_object = (sum(operator.requests().values()) - requests) / result.objects
    result.resident_mib = operator.process.memory_info().rss / 2**20


def steady(kubeconfig: Path, operator: OperatorProcess, result: Result) -> None:
    """Create more at a steady rate; from sending each creation until its Deployment is seen."""
    count = min(max(result.objects, 16), int(STEADY_RATE * STEADY_SECONDS))
    names = [f"steady-{number:04d}" for number in range(count)]

    async def run() -> list[float]:
        async with DeploymentWatch(kubeconfig, NAMESPACE) as watch:
            sent = await create_all(kubeconfig, NAMESPACE, names, rate=STEADY_RATE)
            seen = await watch.wait_for(names)
            return [(seen[name] - sent[name]) * 1e3 for name in names]

    delays = asyncio.run(run())
    result.steady_p50_ms = statistics.median(delays)
    result.steady_p95_ms = statistics.quantiles(delays, n=20)[-1]


def idle(operator: OperatorProcess, result: Result) -> None:
    """Nothing changes for a minute."""
    cpu, requests = cpu_seconds(operator), sum(operator.requests().values())
    time.sleep(IDLE_SECONDS)
    minutes = IDLE_SECONDS / 60
    result.idle_requests_per_minute = (sum(operator.requests().values()) - requests) / minutes
    result.idle_cpu_ms_per_second = (cpu_seconds(operator) - cpu) * 1e3 / IDLE_SECONDS


def restart(operator: OperatorProcess, result: Result, *, ready: str = "False") -> None:
    """Stop and start; all of the new process's CPU until it has looked at everything and is quiet."""
    operator.stop()
    operator.start()
    settle(operator, result.objects, ready=ready)
    used, before = cpu_seconds(operator), 0.0
    while used - before > QUIET_CPU_SECONDS:
        time.sleep(1.0)
        used, before = cpu_seconds(operator), used
    result.restart_cpu_seconds = used
    result.restart_writes = operator.writes()


def install(server: ApiServer, kubeconfig: Path) -> Installation:
    """Install the operator's ServiceAccount and roles: it authenticates by a token and is authorized by RBAC, as in a pod."""
    installed = Installation(server, kubeconfig, raw_manifests())
    installed.apply()
    return installed


def measure(size: int, scratch: Path) -> Result:
    """All measurements of one size."""
    result = Result(size)
    plane = ControlPlane()
    plane.start()
    try:
        plane.daemons["kube-controller-manager"].stop()
        server = ApiServer(plane.kubeconfig, NAMESPACE)
        for definition in CRDS:
            server.install(definition)
        server.create_namespace()
        kubeconfig = install(server, plane.kubeconfig).kubeconfig(scratch / f"operator-{size}.kubeconfig")
        with OperatorProcess(kubeconfig, scratch / f"operator-{size}.log", forked=False) as operator:
            time.sleep(3.0)
            burst(plane.kubeconfig, operator, result)
            restart(operator, result)
            idle(operator, result)
            steady(plane.kubeconfig, operator, result)
    finally:
        plane.stop()
    return result


def table(results: list[Result]) -> str:
    """The results as a Markdown table, with the design's figures for the largest size."""
    heads = ["measure", *(f"{result.objects:,}" for result in results), "aim at 1,000"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for field in dataclasses.fields(Result)[1:]:
        values = [f"{getattr(result, field.name):.1f}" for result in results]
        target = TARGETS.get(field.name)
        aim = "" if target is None else f"{target:g}"
        lines.append(f"| {field.name.replace('_', ' ')} | {' | '.join(values)} | {aim} |")
    return "\n".join(lines)


def run(
    description: str | None,
    sizes: str,
    measure_size: Callable[[int, Path], ResultOfSize],
    make_table: Callable[[list[ResultOfSize]], str],
) -> None:
    """Parse the command line, measure each size, and print what was found; `sizes` is the default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=sizes, help="numbers of InferenceServices (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="skiff-bench-") as scratch:
        for size in map(int, arguments.sizes.split(",")):
            print(f"bench: {size} InferenceServices ...", file=sys.stderr, flush=True)
            results.append(measure_size(size, Path(scratch)))
            print(json.dumps(dataclasses.asdict(results[-1])), file=sys.stderr, flush=True)
    print(make_table(results))
    if arguments.json is not None:
        content = json.dumps([dataclasses.asdict(result) for result in results], indent=1)
        arguments.json.write_text(content + "\n")


if __name__ == "__main__":
    run(__doc__, "1,100,1000", measure, table)
