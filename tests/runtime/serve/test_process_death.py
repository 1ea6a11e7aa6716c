"""A child that dies takes the whole service with it, and every client is told; SIGTERM loses nobody."""

import asyncio
import os
import re
import signal
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from openai import APIError, APIStatusError, AsyncOpenAI
from service import Service, running_service, wait_until
from tiny_models import make_model

from skiff_runtime.contract import EXIT_CHILD_DIED, EXIT_OK, EXIT_USAGE, PHASES

NAME: Final = "tiny"
CLIENTS: Final = 50
HANG_SECONDS: Final = 60.0
FLAGS: Final = ("--served-model-name", NAME, "--max-total-tokens", "131072")
GREEDY: Final[dict[str, Any]] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


async def ask(client: AsyncOpenAI, number: int, tokens: int) -> int:
    """The number of tokens of an answer; half of them are streamed."""
    prompt = [number + 1] * 8
    if number % 2:
        whole = await client.completions.create(model=NAME, prompt=prompt, max_tokens=tokens, **GREEDY)
        assert whole.usage is not None and whole.choices[0].finish_reason == "length"
        return int(whole.usage.completion_tokens)
    usage = None
    stream = await client.completions.create(
        model=NAME,
        prompt=prompt,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    async for chunk in stream:
        usage = chunk.usage or usage
    assert usage is not None, "the stream ended without an error and without its end"
    return int(usage.completion_tokens)


async def all_running(service: Service) -> None:
    def running() -> bool:
        return service.metric("skiff_requests_running") == CLIENTS

    await asyncio.to_thread(wait_until, running)


def client_of(service: Service) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize(
    ("victim", "tp"),
    [("api", 1), ("tokenizer0", 1), ("detokenizer", 1), ("rank0", 1), ("rank0", 2), ("rank1", 2)],
)
def test_every_client_learns_of_a_dead_child(model: Path, victim: str, tp: int) -> None:
    async def scenario(service: Service) -> list[Any]:
        async with client_of(service) as client:
            asked = [asyncio.ensure_future(ask(client, number, 2000)) for number in range(CLIENTS)]
            await all_running(service)
            service.children[victim].kill()
            return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), HANG_SECONDS)

    with running_service(model, *FLAGS, "--tp", str(tp)) as service:
        children = list(service.children.values())
        run_dir = Path(children[0].cmdline()[5])
        ends = asyncio.run(scenario(service))
        assert len(children) == 3 + tp
        assert [end for end in ends if not isinstance(end, APIError)] == []
        assert service.wait_exit() == EXIT_CHILD_DIED
        assert [child for child in children if alive(child)] == []
        assert not run_dir.exists()
        told = re.findall(r"service_failed reason=\"(.*)\"", service.log_text())
        assert told == [f"{victim} was killed by SIGKILL"]
        if victim != "api":
            assert [end for end in ends if "was killed by SIGKILL" not in str(end)] == []


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


TOKENS: Final = 600
"""Enough that the drain takes longer than a new client takes to be refused."""


def test_sigterm_loses_nobody(model: Path) -> None:
    async def scenario(service: Service) -> list[int]:
        async with client_of(service) as client:
            asked = [asyncio.ensure_future(ask(client, number, TOKENS)) for number in range(CLIENTS)]
            await all_running(service)
            service.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: refused(service))
            with pytest.raises(APIStatusError) as caught:
                await ask(client, 1, 1)
            assert caught.value.status_code == 503
            return await asyncio.gather(*asked)

    with running_service(model, *FLAGS, "--drain-timeout-seconds", "300") as service:
        children = list(service.children.values())
        assert asyncio.run(scenario(service)) == [TOKENS] * CLIENTS
        assert service.wait_exit() == EXIT_OK
        assert [child for child in children if alive(child)] == []


def refused(service: Service) -> bool:
    return service.http.get(service.url + "/readyz").status_code == 503


def test_children_die_with_their_supervisor(model: Path) -> None:
    with running_service(model, *FLAGS) as service:
        children = list(service.children.values())
        os.kill(service.process.pid, signal.SIGKILL)
        wait_until(lambda: not any(alive(child) for child in children))


def test_a_child_that_hangs_counts_as_dead(model: Path) -> None:
    with running_service(model, *FLAGS, "--heartbeat-timeout-seconds", "2") as service:
        service.children["detokenizer"].suspend()
        assert service.wait_exit() == EXIT_CHILD_DIED
        assert "detokenizer has been silent for 2 s" in service.log_text()
        assert "--heartbeat-timeout-seconds" in service.log_text()


def test_a_directory_too_deep_for_sockets_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    with running_service(model, *FLAGS, ready=False) as service:
        assert service.wait_exit() == EXIT_USAGE
        assert "TMPDIR" in service.log_text()
        assert len(service.log_text().splitlines()) == 1
        assert list(deep.iterdir()) == []


def test_every_start_phase_is_timed_and_ipv6_is_served(model: Path) -> None:
    with running_service(model, *FLAGS, "--host", "::1") as service:
        assert service.url.startswith("http://[::1]:")
        seconds = service.http.get(service.url + "/server_info").json()["start_phase_seconds"]
        assert list(seconds) == [phase for phase in PHASES if phase != "ready"]
