"""The command ``skiff bench router``: its flags, and the table that it prints."""

import argparse
import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from skiff_runtime import log
from skiff_runtime.bench.flag_types import positive_float, positive_int
from skiff_runtime.bench.report import make_table, write_json
from skiff_runtime.bench.router import measurements
from skiff_runtime.bench.router.measurements import STEADY_RATE, Faults, Latencies, Routing
from skiff_runtime.bench.router.processes import (
    KNOWN,
    SKIFF,
    RunningRouter,
    StubProcess,
    free_ports,
    run_router,
)
from skiff_runtime.contract import EXIT_FAILURE, EXIT_OK
from skiff_runtime.errors import ConfigError, SkiffError

PODS: Final = 4
STREAMS: Final = (64, 256)
DESCRIPTION: Final = """\
Measure what a router costs, and what clients see when a pod fails behind it.

Four stub pods on loopback answer at once, with whole responses and with streams of an
event every 10 ms. Skiff's router runs with keys, limits, metrics and logs, and so does
each other router that is installed, or that --peer names, in the same run. The figures
are of the router's processes alone; still, the machine should have nothing else to do."""
EPILOG: Final = f"""\
routers that are known, and run where they are installed:
{chr(10).join(f"  {name:<15}{command.partition(' --')[0] if name != SKIFF else 'skiff router'}" for name, command in KNOWN.items())}

columns:
  us/request      CPU time for a request of 2 KB with a whole response, from 32 clients as fast as
                  they get responses; then at 500 requests/s, where caches are colder
  us/event        CPU time for an event of 64, and of 256, streams
  first byte      milliseconds that the router adds to a stream's first byte, p50 and p99
  MB              memory of its processes after these
  killed          of {measurements.FAULT_REQUESTS} requests after a pod was killed, those that failed; and how the streams of
                  that pod ended, among {measurements.FAULT_STREAMS} in all
  back            seconds until a pod that was started again gets a request
  hung            of {measurements.FAULT_REQUESTS} requests after a pod was stopped, those without an answer in 10 s
  hits            blocks of 1 KiB that the pod had already, of {measurements.GROUPS} groups of prompts that begin alike, and
                  the requests of the busiest pod in relation to the mean; then the same
                  where all prompts have the first 4 KiB in common

examples:
  skiff bench router
  skiff bench router --router skiff,vllm-router --seconds 10
  skiff bench router --peer 'mine=/opt/mine --listen {{port}} --upstreams {{urls}}'
"""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one router. ``event_us`` is by the number of streams."""

    request_us: float
    steady_request_us: float
    event_us: dict[int, float]
    first_byte: Latencies
    memory_bytes: int
    faults: Faults
    routing: Routing
    routing_shared_head: Routing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of ``skiff bench router``."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--router", metavar="NAME,...", help="those that run, in this order (default: all that are there)"
    )
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="another router, or another command of a known one; {port} is where it shall listen, {urls} are the "
        "pods' addresses; may be repeated",
    )
    parser.add_argument(
        "--seconds",
        type=positive_float,
        default=5.0,
        metavar="SECONDS",
        help="of each measurement of CPU time (default: 5)",
    )
    parser.add_argument(
        "--first-bytes",
        type=positive_int,
        default=300,
        metavar="N",
        help="requests of that column (default: 300)",
    )
    parser.add_argument(
        "--seed", type=positive_int, default=1, metavar="N", help="of the prompts (default: 1)"
    )
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="also write the figures as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure every router and print the table. Raises ConfigError for a router that is not known or not there."""
    commands = _choose(arguments.router, arguments.peer)
    results: dict[str, Result] = {}
    failures: dict[str, str] = {}
    ports = free_ports(PODS)
    pods = [StubProcess(ports[:-1]), StubProcess(ports[-1:])]
    try:
        for pod in pods:
            pod.start()
        for number, (name, command) in enumerate(commands.items(), 1):
            log.event("progress", work=name, done=number - 1, total=len(commands))
            try:
                with run_router(name, command, ports) as router:
                    results[name] = asyncio.run(_measure(router, pods, arguments))
            except SkiffError as error:
                failures[name] = str(error)
    finally:
        for pod in pods:
            pod.kill()
    console = Console(highlight=False)
    console.print(make_table(*_rows(results)))
    for name, message in failures.items():
        console.print(f"{name}: {message}", markup=False)
    if arguments.output_json is not None:
        write_json(arguments.output_json, {name: asdict(result) for name, result in results.items()})
    return EXIT_OK if not failures else EXIT_FAILURE


def _choose(wanted: str | None, peers: Sequence[str]) -> dict[str, str]:
    """Return the commands of the routers that are to run."""
    commands = dict(KNOWN)
    for text in peers:
        name, equals, command = text.partition("=")
        if not (name and equals and command.strip()):
            raise ConfigError(f"--peer {text}: must be NAME=COMMAND")
        commands[name] = command
    if wanted is None:
        return {name: command for name, command in commands.items() if _is_installed(name, command)}
    names = list(dict.fromkeys(wanted.split(",")))
    unknown = [name for name in names if name not in commands]
    if unknown:
        raise ConfigError(
            f"--router {unknown[0]} is not known; there are {', '.join(commands)}, and --peer adds others"
        )
    absent = [name for name in names if not _is_installed(name, commands[name])]
    if absent:
        raise ConfigError(
            f"--router {absent[0]} is not installed: there is no command {commands[absent[0]].split()[0]!r}"
        )
    return {name: commands[name] for name in names}


def _is_installed(name: str, command: str) -> bool:
    return name == SKIFF or shutil.which(command.split()[0]) is not None


async def _measure(
    router: RunningRouter, pods: Sequence[StubProcess], arguments: argparse.Namespace
) -> Result:
    seconds = arguments.seconds
    request_us = await measurements.measure_requests(router, seconds)
    steady_request_us = await measurements.measure_requests(router, seconds, rate=STEADY_RATE)
    event_us = {count: await measurements.measure_events(router, count, seconds) for count in STREAMS}
    first_byte = await measurements.measure_first_bytes(router, pods[0].ports[0], arguments.first_bytes)
    memory_bytes = router.memory_bytes()
    own, shared = [
        await measurements.measure_routing(router, pods, arguments.seed, shared_head=head)
        for head in (False, True)
    ]
    faults = await measurements.measure_faults(router, pods[-1])
    return Result(request_us, steady_request_us, event_us, first_byte, memory_bytes, faults, own, shared)


def _rows(results: dict[str, Result]) -> tuple[Sequence[str], list[Sequence[str]]]:
    heads = ("", *results)
    rows: list[Sequence[str]] = []

    def add(title: str, *texts: str) -> None:
        rows.append((title, *texts))

    found: list[Any] = list(results.values())
    add("us/request", *(f"{each.request_us:.0f}" for each in found))
    add(f"at {STEADY_RATE:.0f}/s", *(f"{each.steady_request_us:.0f}" for each in found))
    for count in STREAMS:
        add(f"us/event, {count} streams", *(f"{each.event_us[count]:.1f}" for each in found))
    add(
        "first byte p50, p99, ms",
        *(f"{each.first_byte.p50_ms:.2f}, {each.first_byte.p99_ms:.2f}" for each in found),
    )
    add("MB", *(f"{each.memory_bytes / 1e6:.0f}" for each in found))
    add("killed: failed requests", *(str(each.faults.failed) for each in found))
    for ending in ("complete", "error event", "cut", "silent"):
        add(f"killed: streams {ending}", *(str(each.faults.endings.get(ending, 0)) for each in found))
    add(
        "back, s",
        *(
            "never" if each.faults.revival_seconds is None else f"{each.faults.revival_seconds:.1f}"
            for each in found
        ),
    )
    add("hung: unanswered requests", *(str(each.faults.unanswered) for each in found))
    for title, attribute in (("hits, imbalance", "routing"), ("with a common head", "routing_shared_head")):
        pairs = [getattr(each, attribute) for each in found]
        add(title, *(f"{each.hits:.1%}, {each.imbalance:.2f}" for each in pairs))
    return heads, rows
