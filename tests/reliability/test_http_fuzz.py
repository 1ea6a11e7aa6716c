"""The wire fuzzer against real front processes: exactly one reply for each request, in order, or an end of the connection."""

import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final

import psutil
import pytest
from background_client import BackgroundClient
from http_fuzz import Verdict, strike
from raw_http import address_of
from tokenizers import Tokenizer

from skiff_runtime.bench.path.frontend_processes import FrontendProcesses
from skiff_runtime.config import Config
from skiff_runtime.processes.resolve import resolve

SHORT: Final = 1500
FULL: Final = int(os.environ.get("SKIFF_TEST_WIRE_CONNECTIONS", "200000"))
SEED: Final = int(os.environ.get("SKIFF_TEST_WIRE_SEED", "1984"))
FIRST: Final = int(os.environ.get("SKIFF_TEST_WIRE_FIRST", "0"))
CONCURRENCY: Final = 24
STEP_MILLISECONDS: Final = 2.0
SETTLE_SECONDS: Final = 30.0
LOST_MIB: Final = 48.0
"""Resident memory that the api process may gain after its first thousands of connections."""


@pytest.fixture
def fronts() -> Iterator[FrontendProcesses]:
    """Api, tokenizer and detokenizer, with a stub in the scheduler's place that answers at once."""
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


def attack(fronts: FrontendProcesses, first: int, count: int) -> Verdict:
    """Carry the connections out beside a client that behaves; neither may see a fault, and nothing may stay behind."""
    model = fronts.launch.config.served_model_name or ""
    with (
        BackgroundClient(fronts.url, model) as beside,
        ProcessPoolExecutor(1, get_context("spawn")) as attacker,
    ):
        job = attacker.submit(strike, address_of(fronts.url), model, first, count, SEED, CONCURRENCY)
        verdict = job.result()
    told = {"right": beside.right, "wrong": beside.wrong, "slowest_seconds": round(beside.slowest_seconds, 3)}
    print(json.dumps({"wire": verdict.summary(), "beside": told}, indent=1))
    assert verdict.breaches == []
    assert verdict.connections == count
    assert beside.wrong == 0 and beside.right > 0, beside.examples
    nothing_left(fronts)
    return verdict


def nothing_left(fronts: FrontendProcesses) -> None:
    """Soon no request is in flight, and no connection is open but the one that asks."""
    api = api_process(fronts)
    deadline = time.monotonic() + SETTLE_SECONDS
    while (count := len([each for each in api.net_connections("tcp") if each.status != "LISTEN"])) > 0:
        assert time.monotonic() < deadline, f"{count} connections are still open"
        time.sleep(0.05)


def api_process(fronts: FrontendProcesses) -> psutil.Process:
    [api] = [each for each in fronts.watched if each.name == "api"]
    return psutil.Process(api.handle.pid)


def test_drawn_connections(fronts: FrontendProcesses) -> None:
    verdict = attack(fronts, FIRST, SHORT)
    assert {200, 400, 404, 405, 417, 431, 505} <= set(verdict.statuses)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_drawn_connections_at_length(fronts: FrontendProcesses) -> None:
    warm = min(FULL // 10, 5000)
    attack(fronts, FIRST, warm)
    before = api_process(fronts).memory_info().rss
    attack(fronts, FIRST + warm, FULL - warm)
    gained = (api_process(fronts).memory_info().rss - before) / 2**20
    assert gained < LOST_MIB, f"the api process gained {gained:.0f} MiB"
