"""A rank that hangs ends the service, though others wait for it in a collective; every client gets the reason."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI
from service import Service, running_service, wait_until
from tiny_models import make_model

from skiff_runtime.contract import EXIT_CHILD_DIED

CLIENTS = 8
HANG_SECONDS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


async def suspend_while_running(service: Service, victim: str) -> list[Any]:
    """Return the outcomes of requests that ran when ``victim`` was suspended."""
    async with AsyncOpenAI(
        base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        requests = [
            asyncio.ensure_future(
                client.completions.create(
                    model="tiny",
                    prompt=[number + 1] * 8,
                    max_tokens=3000,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
            )
            for number in range(CLIENTS)
        ]
        await asyncio.to_thread(wait_until, lambda: service.metric("skiff_requests_running") == CLIENTS)
        service.children[victim].suspend()
        return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), HANG_SECONDS)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (
            ("--heartbeat-timeout-seconds", "3"),
            r"rank1 has been silent for 3 s \(--heartbeat-timeout-seconds\)",
        ),
        (
            ("--watchdog-timeout", "2"),
            r"rank0 exited with code 1: step \d+, of \d+ tokens in \d+ rows, took longer than 2 s; "
            r"if it does not hang, lower --max-num-batched-tokens or raise --watchdog-timeout",
        ),
    ],
)
def test_suspended_rank_fails_every_request_with_the_reason(
    model: Path, flags: tuple[str, str], reason: str
) -> None:
    """Rank 0 waits for rank 1 in a collective. It sends heartbeats, so that rank 1 is blamed, until the watchdog ends it."""
    with running_service(
        model, "--served-model-name", "tiny", "--max-total-tokens", "32768", "--tp", "2", *flags
    ) as service:
        ends = asyncio.run(suspend_while_running(service, "rank1"))
        assert [end for end in ends if not isinstance(end, APIError)] == []
        assert all(re.search(reason, str(end)) for end in ends), ends[0]
        assert service.wait_exit() == EXIT_CHILD_DIED
        [logged] = re.findall(r"service_failed reason=\"(.*)\"", service.log_text())
        assert re.fullmatch(reason, logged)
