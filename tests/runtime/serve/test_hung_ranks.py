"""A rank that hangs, and the ranks that wait for it in a collective, end the service; every client is told why."""

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


async def ask_and_hang(service: Service, victim: str) -> list[Any]:
    """What became of clients whose requests ran when ``victim`` was stopped."""
    async with AsyncOpenAI(
        base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        asked = [
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
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), HANG_SECONDS)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--heartbeat-timeout-seconds", "3"),
            r"rank1 has been silent for 3 s, which --heartbeat-timeout-seconds allows at most",
        ),
        (
            ("--watchdog-timeout", "2"),
            r"rank0 exited with code 1: step \d+, of \d+ tokens in \d+ rows, took longer than 2 s; "
            r"if it does not hang, lower --max-num-batched-tokens or raise --watchdog-timeout",
        ),
    ],
)
def test_a_stopped_rank_hangs_nobody(model: Path, flags: tuple[str, str], told: str) -> None:
    """Rank 0 waits for rank 1 in a collective: it beats, so that the right one is blamed, but not for ever."""
    with running_service(
        model, "--served-model-name", "tiny", "--max-total-tokens", "32768", "--tp", "2", *flags
    ) as service:
        ends = asyncio.run(ask_and_hang(service, "rank1"))
        assert [end for end in ends if not isinstance(end, APIError)] == []
        assert all(re.search(told, str(end)) for end in ends), ends[0]
        assert service.wait_exit() == EXIT_CHILD_DIED
        [reason] = re.findall(r"service_failed reason=\"(.*)\"", service.log_text())
        assert re.fullmatch(told, reason)
