"""Resources of a whole service: processes, memory, descriptors, KV pages; and leftovers after its end."""

import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
from service import Service, wait_until

MIB: Final = 1 << 20
ORPHAN_SECONDS: Final = 30.0
"""Time in which a process notices that its parent is gone."""


@dataclass
class Family:
    """The processes of one service and its private directory, recorded while it runs."""

    processes: list[psutil.Process]
    run_dir: Path

    @staticmethod
    def of(service: Service) -> "Family":
        """Record all descendants of the supervisor."""
        found = psutil.Process(service.process.pid).children(recursive=True)
        return Family(found, Path(found[0].cmdline()[5]))

    def left(self) -> list[str]:
        """Return what is left of a service that has ended.

        The grammar compiler is a child of the tokenizer. If the tokenizer was killed, the compiler notices that and ends, but
        it may outlive the supervisor by a moment.
        """
        deadline = time.monotonic() + ORPHAN_SECONDS
        while any(is_alive(each) for each in self.processes) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [f"process {each.pid}" for each in self.processes if is_alive(each)]
        if self.run_dir.exists():
            left.append(f"directory {self.run_dir}")
        return left


def is_alive(process: psutil.Process) -> bool:
    """Return whether the process exists and is no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_dirs() -> set[str]:
    """Return the names of all services' private directories on this machine."""
    return {each.name for each in Path(tempfile.gettempdir()).glob("skiff-*")}


def grammar_process(service: Service) -> psutil.Process | None:
    """Return the grammar compiler, which a tokenizer process starts on demand."""
    for child in psutil.Process(service.process.pid).children(recursive=True):
        if "skiff_runtime.grammar.compiler.compiler_process" in child.cmdline():
            return child
    return None


def check_nothing_held(service: Service, timeout_seconds: float = 60.0) -> None:
    """Check that soon no request is in the service and every page is free or cached."""
    wait_until(lambda: held(service) == [], timeout_seconds)
    total = service.http.get(service.url + "/server_info").json()["kv_tokens"]
    size = service.http.get(service.url + "/server_info").json()["config"]["page_size"]
    assert pages(service, "free") + pages(service, "cached") == total // size


def held(service: Service) -> list[str]:
    """Return the metrics of what is still in use."""
    names = ("skiff_requests_in_flight", "skiff_requests_running", "skiff_requests_queued")
    busy = [name for name in names if service.metric(name)]
    return busy + (["pages"] if pages(service, "used") else [])


def pages(service: Service, state: str) -> float:
    """Return the number of KV pages in ``state``: free, cached or used."""
    return service.metric(f'skiff_kv_cache_pages{{state="{state}"}}')


@dataclass
class Usage:
    """Memory and descriptors of each process over a run, sampled by progress (0 to 1)."""

    family: dict[str, psutil.Process]
    samples: list[tuple[float, dict[str, tuple[int, int]]]] = field(default_factory=list)

    def sample(self, progress: float) -> None:
        """Record resident bytes and open descriptors of each process."""
        now = {name: (each.memory_info().rss, each.num_fds()) for name, each in self.family.items()}
        self.samples.append((progress, now))

    def resident_mib(self, name: str, low: float, high: float) -> float:
        """Return the median resident memory between two points of progress."""
        sampled = [now[name][0] for at, now in self.samples if low <= at <= high]
        return statistics.median(sampled) / MIB

    def report(self) -> dict[str, dict[str, float]]:
        """Return, by process, resident MiB in the second and last tenths, and descriptors in the first and last samples."""
        first, last = self.samples[0][1], self.samples[-1][1]
        return {
            name: {
                "second_tenth_mib": round(self.resident_mib(name, 0.1, 0.2), 1),
                "last_tenth_mib": round(self.resident_mib(name, 0.9, 1.0), 1),
                "first_descriptors": first[name][1],
                "last_descriptors": last[name][1],
            }
            for name in self.family
        }


def family_of(service: Service) -> dict[str, psutil.Process]:
    """Return every process by name, including the supervisor and the grammar compiler."""
    found = {"supervisor": psutil.Process(service.process.pid), **service.children}
    compiler = grammar_process(service)
    return found if compiler is None else {**found, "grammar": compiler}
