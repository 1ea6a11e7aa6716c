"""Show the load of InferenceServices, live: requests, tokens a second, KV cache, prefix cache and LoRA adapters.

Without a name, one line for each InferenceService of the namespace; with one, a line for each of its pods. The numbers
are those of the pods' /metrics, read through the API server's proxy: this needs the right `get` on `pods/proxy`, which
Kubernetes' roles edit and admin have. Rates are over the last interval.
"""

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from skiff_operator import workload
from skiff_operator.cli import cluster, table
from skiff_operator.cli.cluster import Cluster
from skiff_operator.errors import ApiRefused, OperatorError
from skiff_operator.kinds import INFERENCE_SERVICE, POD
from skiff_runtime import contract

MAX_PODS: Final = 500
_SCRAPE_SECONDS: Final = 5.0
_CLEAR: Final = "\x1b[H\x1b[2J"
_COUNTERS: Final = (
    contract.METRIC_FINISHED,
    contract.METRIC_PROMPT_TOKENS,
    contract.METRIC_GENERATION_TOKENS,
    contract.METRIC_PREFIX_CACHE_QUERIES,
    contract.METRIC_PREFIX_CACHE_HITS,
)
_GAUGES: Final = (
    contract.METRIC_RUNNING,
    contract.METRIC_QUEUED,
    contract.METRIC_KV_CACHE_USAGE,
    contract.METRIC_ADAPTERS,
)
_LORA_SLOTS: Final = re.compile(
    rf"{contract.METRIC_LORA_SLOTS}\{{.*?state=\"(?P<state>\w+)\".*?\}} (?P<number>\S+)"
)
_LORA: Final = ("ADAPTERS", "LORA SLOTS")
"""Columns that are shown where a pod serves LoRA adapters."""
_HEAD: Final = (
    "READY",
    "RUNNING",
    "QUEUED",
    "REQUESTS/S",
    "PROMPT TOK/S",
    "OUTPUT TOK/S",
    "KV CACHE",
    "CACHE HITS",
)


@dataclass(frozen=True)
class Sample:
    """One scrape of one pod: the sum of each metric's series, at a time in seconds of a steady clock.

    `lora_slots`: by their state, used, idle or empty.
    """

    at: float
    values: dict[str, float]
    lora_slots: dict[str, float] = field(default_factory=dict)

    @classmethod
    def parse(cls, page: str, at: float) -> "Sample":
        """Read a page of Prometheus' text format, whose lines end with the value."""
        values = dict.fromkeys((*_COUNTERS, *_GAUGES), 0.0)
        lora_slots: dict[str, float] = {}
        for line in page.splitlines():
            name = line.partition(" ")[0].partition("{")[0]
            if name in values:
                values[name] += float(line.rpartition(" ")[2])
            elif slots := _LORA_SLOTS.match(line):
                lora_slots[slots["state"]] = float(slots["number"])
        return cls(at, values, lora_slots)


@dataclass(frozen=True)
class Pod:
    """One pod of a service at two times. A sample is None if it was not read; `error` has the reason."""

    name: str
    service: str
    ready: bool
    before: Sample | None = None
    after: Sample | None = None
    error: str = ""

    def rate(self, metric: str) -> float | None:
        """Return the increase a second; None without two samples, or when the counter began anew."""
        if self.before is None or self.after is None or self.after.at <= self.before.at:
            return None
        grown = self.after.values[metric] - self.before.values[metric]
        return grown / (self.after.at - self.before.at) if grown >= 0 else None


@dataclass
class Row:
    """One line of the table: the sum over its pods."""

    name: str
    pods: list[Pod] = field(default_factory=list)

    def cells(self) -> list[str]:
        """Return the row's cells."""
        samples = [pod.after for pod in self.pods if pod.after is not None]
        usage = [sample.values[contract.METRIC_KV_CACHE_USAGE] for sample in samples]
        queries, hits = (
            self._rate(name)
            for name in (contract.METRIC_PREFIX_CACHE_QUERIES, contract.METRIC_PREFIX_CACHE_HITS)
        )
        return [
            self.name,
            f"{sum(pod.ready for pod in self.pods)}/{len(self.pods)}",
            *(
                f"{sum(sample.values[name] for sample in samples):.0f}" if samples else "-"
                for name in (contract.METRIC_RUNNING, contract.METRIC_QUEUED)
            ),
            *(
                _number(self._rate(name))
                for name in (
                    contract.METRIC_FINISHED,
                    contract.METRIC_PROMPT_TOKENS,
                    contract.METRIC_GENERATION_TOKENS,
                )
            ),
            f"{sum(usage) / len(usage):.0%}" if usage else "-",
            f"{hits / queries:.0%}" if queries and hits is not None else "-",
        ]

    def lora_cells(self) -> list[str]:
        """Return the cells of the columns on LoRA: the most adapters of a pod, and the slots that hold one, of all."""
        samples = [pod.after for pod in self.pods if pod.after is not None]
        slots = sum(sum(sample.lora_slots.values()) for sample in samples)
        if not slots:
            return ["-", "-"]
        filled = slots - sum(sample.lora_slots.get("empty", 0.0) for sample in samples)
        adapters = max(sample.values[contract.METRIC_ADAPTERS] for sample in samples)
        return [f"{adapters:.0f}", f"{filled:.0f}/{slots:.0f}"]

    def _rate(self, metric: str) -> float | None:
        """Add up the rates of the pods that have one; None if none has."""
        rates = [rate for pod in self.pods if (rate := pod.rate(metric)) is not None]
        return sum(rates) if rates else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the command."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="an InferenceService (default: all of them)")
    parser.add_argument(
        "--once",
        action="store_true",
        help="show one screen and end; the default if the output is no terminal",
    )
    parser.add_argument(
        "--interval",
        type=_interval,
        default=2.0,
        metavar="SECONDS",
        help="between two screens, 0.5 to 60 (default: 2)",
    )
    cluster.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print a screen after each interval until Ctrl-C; only one with `--once`, or if the output is no terminal."""
    live = sys.stdout.isatty() and not arguments.once
    with cluster.connected(arguments) as connected:
        services = _services(connected, arguments.name)
        pods = observe(connected, arguments.name, {})
        while True:
            before = {pod.name: pod.after for pod in pods if pod.after is not None}
            time.sleep(arguments.interval)
            pods = observe(connected, arguments.name, before)
            screen = render(services, pods, by_pod=arguments.name is not None)
            print((_CLEAR if live else "") + screen, flush=True)
            if not live:
                return 0
            services = _services(connected, arguments.name)


def render(services: Sequence[str], pods: Sequence[Pod], *, by_pod: bool) -> str:
    """Return the table of the services, or with `by_pod` of the pods, and a line for each pod that was not read."""
    if by_pod:
        rows = [Row(pod.name, [pod]) for pod in pods]
    else:
        rows = [Row(name, [pod for pod in pods if pod.service == name]) for name in services]
    if not rows:
        return "no pods" if by_pod else "no InferenceServices in this namespace"
    heads, cells = list(_HEAD), [row.cells() for row in rows]
    if any(pod.after is not None and sum(pod.after.lora_slots.values()) for pod in pods):
        heads += _LORA
        cells = [[*own, *row.lora_cells()] for own, row in zip(cells, rows, strict=True)]
    text = table.render(("POD" if by_pod else "NAME", *heads), cells, right=range(2, len(heads) + 1))
    failed = [f"pod {pod.name}: {pod.error}" for pod in pods if pod.error]
    return "\n".join([text, *failed])


def observe(connected: Cluster, name: str | None, before: dict[str, Sample]) -> list[Pod]:
    """Scrape every pod of the services at once.

    Raises:
        OperatorError: the user may not read metrics through the API server.
    """
    selector = contract.LABEL_SERVICE if name is None else f"{contract.LABEL_SERVICE}={_bare(name)}"
    found = connected.list(POD, selector=selector)
    owned = [pod for pod in found if workload.runs_in(pod, pod["metadata"]["labels"][contract.LABEL_SERVICE])]
    alive = [pod for pod in owned if (pod.get("status") or {}).get("phase") in ("Pending", "Running")]
    alive.sort(key=lambda pod: str(pod["metadata"]["name"]))
    if len(alive) > MAX_PODS:
        raise OperatorError(
            f"{len(alive)} pods; at most {MAX_PODS} are read at once: give the name of one service"
        )

    async def scrape_all() -> list[Pod]:
        return await asyncio.gather(*(_scrape(connected, pod, before) for pod in alive))

    return connected.run(scrape_all())


def _services(connected: Cluster, name: str | None) -> list[str]:
    if name is not None:
        return [str(connected.service(name)["metadata"]["name"])]
    return sorted(str(each["metadata"]["name"]) for each in connected.list(INFERENCE_SERVICE))


async def _scrape(connected: Cluster, pod: dict[str, Any], before: dict[str, Sample]) -> Pod:
    meta, status = pod["metadata"], pod.get("status") or {}
    name, service = str(meta["name"]), str(meta["labels"][contract.LABEL_SERVICE])
    ready = any(
        each["type"] == "Ready" and each["status"] == "True" for each in status.get("conditions") or []
    )
    if not any("running" in (each.get("state") or {}) for each in status.get("containerStatuses") or []):
        return Pod(name, service, ready)
    path = POD.path(connected.namespace, f"{name}:{contract.API_PORT}", f"proxy{contract.PATH_METRICS}")
    try:
        page = await asyncio.wait_for(connected.client.send("GET", path), _SCRAPE_SECONDS)
        sample = Sample.parse(page.decode(errors="replace"), time.monotonic())
    except ApiRefused as error:
        if error.status == 403:
            raise OperatorError(
                f"{error}: metrics are read through the API server, which needs `get` on pods/proxy, as the role edit has"
            ) from error
        return Pod(name, service, ready, error=str(error))
    except (OperatorError, TimeoutError, ValueError) as error:
        return Pod(name, service, ready, error=str(error) or f"no metrics within {_SCRAPE_SECONDS:g} s")
    return Pod(name, service, ready, before.get(name), sample)


def _bare(name: str) -> str:
    """Return the name without the kind in front of it, as in `infsvc/NAME`."""
    return name.rpartition("/")[2]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.5 <= value <= 60:
        raise argparse.ArgumentTypeError(f"must be from 0.5 to 60 seconds, not {text!r}")
    return value
