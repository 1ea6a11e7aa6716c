"""The HTTP fuzzer against real frontend processes, and against a router before them.

Each connection gets one response per request, in order, or is closed.
"""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Final, cast

import psutil
import pytest
from background_client import BackgroundClient
from http_fuzz import Verdict, strike
from raw_http import address_of
from routers import router_process
from tokenizers import Tokenizer

from skiff_runtime.bench.path.frontend_processes import FrontendProcesses
from skiff_runtime.config import Config
from skiff_runtime.processes.resolve import resolve

pytestmark = pytest.mark.integration

RUNTIME: Final = "runtime"
ROUTER: Final = "router"
SHORT: Final = {RUNTIME: 1500, ROUTER: 600}
"""Connections of the short tests; most of a router's way is that of the runtime's API."""
FULL: Final = int(os.environ.get("SKIFF_TEST_HTTP_FUZZ_CONNECTIONS", "200000"))
SEED: Final = int(os.environ.get("SKIFF_TEST_HTTP_FUZZ_SEED", "1984"))
FIRST: Final = int(os.environ.get("SKIFF_TEST_HTTP_FUZZ_FIRST", "0"))
CONCURRENCY: Final = 24
STEP_MILLISECONDS: Final = 2.0
SETTLE_SECONDS: Final = 30.0
MAX_GROWTH_MIB: Final = 48.0
"""Limit on the growth of a process's resident memory after its first thousands of connections."""


@dataclass(frozen=True)
class Target:
    """A process that is attacked."""

    kind: str
    url: str
    model: str
    process: psutil.Process


@pytest.fixture
def fronts() -> Iterator[FrontendProcesses]:
    """Run API, tokenizer and detokenizer, with a stub of the scheduler that replies at once."""
    tokenizer = Tokenizer.from_file(str(resolve(Config(model="demo://"))[1].path / "tokenizer.json"))
    [*_, token] = tokenizer.encode(" pod", add_special_tokens=False).ids
    with FrontendProcesses(
        "demo://",
        tokenizer_worker_num=1,
        tokenizer_backend="tokenizers",
        step_milliseconds=STEP_MILLISECONDS,
        token=token,
    ) as running:
        yield running


@pytest.fixture(params=[RUNTIME, ROUTER])
def target(request: pytest.FixtureRequest, fronts: FrontendProcesses) -> Iterator[Target]:
    """The API process itself, or a router that sends to it."""
    kind, model = cast(str, request.param), fronts.launch.config.served_model_name or ""
    if kind == RUNTIME:
        [api] = [each for each in fronts.watched if each.name == "api"]
        yield Target(kind, fronts.url, model, psutil.Process(api.handle.pid))
        return
    with router_process(f"--backend={model}={fronts.url}") as (url, pid):
        yield Target(kind, url, model, psutil.Process(pid))


def attack(target: Target, first: int, count: int) -> Verdict:
    """Run the connections beside a well-behaved client. Neither may see a fault, and no connection may stay open."""
    with (
        BackgroundClient(target.url, target.model) as background,
        ProcessPoolExecutor(1, get_context("spawn")) as attacker,
    ):
        job = attacker.submit(strike, address_of(target.url), target.model, first, count, SEED, CONCURRENCY)
        verdict = job.result()
    results = {
        "right": background.right,
        "wrong": background.wrong,
        "slowest_seconds": round(background.slowest_seconds, 3),
    }
    print(json.dumps({"http_fuzz": verdict.summary(), "background": results}, indent=1))
    assert verdict.violations == []
    assert verdict.connections == count
    assert background.wrong == 0 and background.right > 0, background.examples
    assert_no_connections(target)
    return verdict


def assert_no_connections(target: Target) -> None:
    """Assert that soon no client's connection is open."""
    port = address_of(target.url)[1]
    deadline = time.monotonic() + SETTLE_SECONDS
    while open_connections(target.process, port):
        assert time.monotonic() < deadline, (
            f"{open_connections(target.process, port)} connections are still open"
        )
        time.sleep(0.05)


def open_connections(process: psutil.Process, port: int) -> int:
    """Return the number of connections to the port that a process listens on."""
    connections = process.net_connections("tcp")
    return sum(each.status != "LISTEN" and each.laddr.port == port for each in connections)


def test_random_connections(target: Target) -> None:
    verdict = attack(target, FIRST, SHORT[target.kind])
    assert {200, 400, 404, 405, 417, 431, 505} <= set(verdict.statuses)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_random_connections_at_length(target: Target) -> None:
    warm = min(FULL // 10, 5000)
    attack(target, FIRST, warm)
    before = target.process.memory_info().rss
    attack(target, FIRST + warm, FULL - warm)
    growth = (target.process.memory_info().rss - before) / 2**20
    assert growth < MAX_GROWTH_MIB, f"the process grew by {growth:.0f} MiB"
