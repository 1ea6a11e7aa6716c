"""The API fuzzer: no hostile request gets a 5xx or hangs, and a well-behaved stream continues beside them."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

import pytest
from api_fuzz import Verdict, running_itl_client, strike
from raw_http import address_of
from service import Service, running_service
from watch import check_nothing_held

pytestmark = pytest.mark.integration

NAME: Final = "demo"
SHORT: Final = 600
SHORT_CONCURRENCY: Final = 8
CONCURRENCY: Final = int(os.environ.get("SKIFF_TEST_FUZZ_CONCURRENCY", "2"))
"""The fuzzer shares the machine's cores with the service: more at a time would measure the machine."""
FULL: Final = int(os.environ.get("SKIFF_TEST_FUZZ_REQUESTS", "50000"))
SCHEMATHESIS_EXAMPLES: Final = int(os.environ.get("SKIFF_TEST_SCHEMATHESIS_EXAMPLES", "500"))
"""Examples for each operation and phase."""
SHORT_EXAMPLES: Final = 3
SEED: Final = 1984
BASELINE_SECONDS: Final = 10.0
STREAMED: Final = (1000, 0.0)
SHORT_STREAMED: Final = (50, 0.5)
"""Tokens of a stream of the well-behaved client, and the pause after it. Without pauses it takes two cores."""
MAX_STALL_MS: Final = 5000.0
"""A process that a request blocks stalls every other client; pauses of scheduling are ten times shorter. How p99 moves is
reported and not bounded: its ratio to the median before is between 2.6 and 3.4 in runs of the same code."""
NICENESS: Final = 15
"""Niceness of the fuzzer, which outside of tests would run on another machine."""
FLAGS: Final = (
    "--served-model-name",
    NAME,
    "--max-total-tokens",
    "16384",
    "--grammar-timeout-seconds",
    "1",
)
CHECKS: Final = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


def attack(
    service: Service, count: int, concurrency: int, baseline_seconds: float, streamed: tuple[int, float]
) -> tuple[Verdict, dict[str, Any]]:
    """Return the verdict, and the inter-token latency of a well-behaved client before and meanwhile."""
    processes = {name: each.pid for name, each in service.children.items()}
    first = {"text": "x", "max_tokens": 1, "guided_choice": ["a"]}
    assert service.http.post(service.url + "/generate", json=first, timeout=60).status_code == 200
    with running_itl_client(service.url, *streamed) as itl:
        time.sleep(1)
        itl.mark()
        time.sleep(baseline_seconds)
        before = itl.mark()
        with ProcessPoolExecutor(1, get_context("spawn"), os.nice, (NICENESS,)) as attacker:
            verdict = attacker.submit(strike, address_of(service.url), count, SEED, concurrency).result()
        meanwhile = itl.mark()
    print(json.dumps({"fuzz": verdict.summary(), "itl_before": before, "itl_meanwhile": meanwhile}, indent=1))
    check_nothing_held(service)
    assert {name: each.pid for name, each in service.children.items()} == processes
    return verdict, {"before": before, "meanwhile": meanwhile}


def write_openapi(service: Service, file: Path) -> None:
    """Write the OpenAPI document, with the model's name filled in."""
    document = service.http.get(service.url + "/openapi.json").json()
    for schema in document["components"]["schemas"].values():
        model = schema.get("properties", {}).get("model", {})
        if model.get("type") == "string":
            model["const"] = NAME
    file.write_text(json.dumps(document))


def run_schemathesis(service: Service, count: int, phases: str, folder: Path) -> None:
    """Test the service with schemathesis on its OpenAPI document, with valid and invalid examples."""
    write_openapi(service, folder / "openapi.json")
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        str(folder / "openapi.json"),
        "--url",
        service.url,
        "--checks",
        ",".join(CHECKS),
        "--max-examples",
        str(count),
        "--seed",
        str(SEED),
        "--phases",
        phases,
        "--exclude-path",
        "/abort",
        "--exclude-path",
        "/events",
        "--request-timeout",
        "60",
        "--no-color",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    check_nothing_held(service)


def test_hostile_requests(tmp_path: Path) -> None:
    with running_service("demo://", *FLAGS) as service:
        verdict, _ = attack(service, SHORT, SHORT_CONCURRENCY, 0.5, SHORT_STREAMED)
        assert verdict.problems == []
        run_schemathesis(service, SHORT_EXAMPLES, "fuzzing", tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_hostile_requests_at_length() -> None:
    with running_service("demo://", *FLAGS) as service:
        verdict, latency = attack(service, FULL, CONCURRENCY, BASELINE_SECONDS, STREAMED)
        assert verdict.problems == []
        assert latency["meanwhile"]["max_ms"] <= MAX_STALL_MS, latency


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_openapi_examples_at_length(tmp_path: Path) -> None:
    with running_service("demo://", *FLAGS) as service:
        run_schemathesis(service, SCHEMATHESIS_EXAMPLES, "examples,coverage,fuzzing", tmp_path)
