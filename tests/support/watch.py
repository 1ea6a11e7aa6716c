"""What a whole service holds: processes, memory, descriptors, pages; and what it leaves behind."""

import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil
from service import Service, wait_until

MIB: Final = 1 << 20


@dataclass
class Family:
    """The processes of one service and its private directory, noted while it lives."""

    processes: list[psutil.Process]
    run_dir: Path

    @staticmethod
    def of(service: Service) -> "Family":
        """All processes below the supervisor, those that its children started too."""
        found = psutil.Process(service.process.pid).children(recursive=True)
        return Family(found, Path(found[0].cmdline()[5]))

    def left(self) -> list[str]:
        """What is still there of a service that has ended."""
        there = [f"process {each.pid}" for each in self.processes if alive(each)]
        if self.run_dir.exists():
            there.append(f"directory {self.run_dir}")
        return there


def alive(process: psutil.Process) -> bool:
    """Whether it runs, or could."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_dirs() -> set[str]:
    """The private directories of services that there are on this machine."""
    return {each.name for each in Path(tempfile.gettempdir()).glob("skiff-*")}


def grammar_process(service: Service) -> psutil.Process | None:
    """The compiler of grammars, which a tokenizer process starts when it first needs it."""
    for child in psutil.Process(service.process.pid).children(recursive=True):
        if "skiff_runtime.grammar.compiler.compiler_process" in child.cmdline():
            return child
    return None


def nothing_held(service: Service, timeout_seconds: float = 60.0) -> None:
    """Fail unless, soon, no request is anywhere and every page is free or cached."""
    wait_until(lambda: held(service) == [], timeout_seconds)
    total = service.http.get(service.url + "/server_info").json()["kv_tokens"]
    size = service.http.get(service.url + "/server_info").json()["config"]["page_size"]
    assert pages(service, "free") + pages(service, "cached") == total // size


def held(service: Service) -> list[str]:
    """What is not at rest."""
    names = ("skiff_requests_in_flight", "skiff_requests_running", "skiff_requests_queued")
    busy = [name for name in names if service.metric(name)]
    return busy + (["pages"] if pages(service, "used") else [])


def pages(service: Service, state: str) -> float:
    """Pages of the KV cache in ``state``: free, cached or used."""
    return service.metric(f'skiff_kv_cache_pages{{state="{state}"}}')


@dataclass
class Usage:
    """Memory and descriptors of each process over a run, sampled by progress (0 to 1)."""

    family: dict[str, psutil.Process]
    samples: list[tuple[float, dict[str, tuple[int, int]]]] = field(default_factory=list)

    def sample(self, progress: float) -> None:
        """Note resident bytes and open descriptors of each process."""
        now = {name: (each.memory_info().rss, each.num_fds()) for name, each in self.family.items()}
        self.samples.append((progress, now))

    def resident_mib(self, name: str, low: float, high: float) -> float:
        """The median between two points of progress."""
        told = [now[name][0] for at, now in self.samples if low <= at <= high]
        return statistics.median(told) / MIB

    def report(self) -> dict[str, dict[str, float]]:
        """By process: resident MiB in the second tenth and in the last, descriptors in the first sample and in the last."""
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
    """Every process by name, the supervisor among them."""
    found = {"supervisor": psutil.Process(service.process.pid), **service.children}
    compiler = grammar_process(service)
    return found if compiler is None else {**found, "grammar": compiler}
