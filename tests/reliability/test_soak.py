"""100,000 short requests: none hangs or gets a wrong answer, and nothing leaks."""

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any, Final

import pytest
from raw_http import address_of
from service import Service, running_service
from soak import Soak
from soak_requests import MODEL
from watch import Usage, check_nothing_held, family_of, pages

pytestmark = pytest.mark.integration

SHORT: Final = 300
SHORT_POOL: Final = 40
POOL: Final = 200
FULL: Final = int(os.environ.get("SKIFF_TEST_SOAK_REQUESTS", "100000"))
SEED: Final = 404
FLAGS: Final = (
    "--served-model-name",
    MODEL,
    "--dtype",
    "float32",
    "--max-total-tokens",
    "1024",
    "--max-model-len",
    "1024",
    "--max-running-requests",
    "48",
    "--log-level",
    "debug",
)
"""The KV cache is smaller than the pool of questions, so pages are evicted; debug makes an idle scheduler check each page."""
FLAT_MIB: Final = 8.0
FLAT_SHARE: Final = 0.03


def soak(service: Service, count: int, pool: int, sample: Callable[[float], None]) -> Soak:
    """Run the soak, and check that it left nothing behind."""

    async def scenario() -> Soak:
        run = Soak(address_of(service.url), count=count, pool=pool, seed=SEED)
        await run.prepare()
        await run.run(sample)
        return run

    run = asyncio.run(scenario())
    check_nothing_held(service)
    assert service.http.post(service.url + "/flush_cache", json={}).status_code == 200
    assert service.http.get(service.url + "/health_generate", timeout=60).status_code == 200
    return run


def check(run: Soak) -> None:
    """Check that no request hung and no answer was wrong."""
    assert run.outcome.hung == []
    assert run.outcome.wrong == []
    assert {"right", "disconnected", "too_long", "malformed"} == set(run.outcome.counts)


def test_short_requests_leak_nothing() -> None:
    with running_service("demo://", *FLAGS) as service:
        run = soak(service, SHORT, SHORT_POOL, lambda _: None)
        print(json.dumps({"soak": run.outcome.summary()}))
        check(run)
        assert service.metric("skiff_evicted_pages_total") > 0
        assert pages(service, "cached") <= 1, "the pages of the health check"


def growth(usage: Usage) -> dict[str, Any]:
    """Return the processes whose memory grew after the first tenth."""
    grown = {}
    for name, reported in usage.report().items():
        limit = reported["second_tenth_mib"] + max(FLAT_MIB, FLAT_SHARE * reported["second_tenth_mib"])
        if reported["last_tenth_mib"] > limit:
            grown[name] = reported
    return grown


@pytest.mark.soak
@pytest.mark.timeout(14400)
def test_short_requests_at_length_leak_nothing() -> None:
    with running_service("demo://", *FLAGS) as service:
        soak(
            service, SHORT, SHORT_POOL, lambda _: None
        )  # starts the grammar compiler, which starts on demand
        family = family_of(service)
        before = {name: each.num_fds() for name, each in family.items()}
        usage = Usage(family)
        run = soak(service, FULL, POOL, usage.sample)
        after = {name: each.num_fds() for name, each in family.items()}
        summary = {**run.outcome.summary(), "usage": usage.report(), "descriptors": [before, after]}
        print(json.dumps({"soak": summary}, indent=1))
        check(run)
        assert growth(usage) == {}
        assert {name: after[name] - before[name] for name in family if after[name] > before[name] + 2} == {}
