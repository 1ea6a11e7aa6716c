"""A child that dies ends the whole service, and every client gets an error; SIGTERM drains without losing a request."""

import asyncio
import re
import signal
from pathlib import Path
from typing import Any, Final

import pytest
from openai import APIError, APIStatusError, AsyncOpenAI
from service import Service, running_service, wait_until
from tiny_models import make_model
from watch import is_alive

from skiff_runtime.api.http.late_requests import QUIET_SECONDS
from skiff_runtime.contract import EXIT_CHILD_DIED, EXIT_OK, EXIT_USAGE

pytestmark = pytest.mark.integration

NAME: Final = "tiny"
CLIENTS: Final = 50
HANG_SECONDS: Final = 60.0
FLAGS: Final = ("--served-model-name", NAME, "--max-total-tokens", "131072")
GREEDY: Final[dict[str, Any]] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


async def ask(client: AsyncOpenAI, number: int, tokens: int) -> int:
    """Send one request, streamed where ``number`` is even; return the number of tokens of its answer."""
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


async def wait_all_accepted(service: Service) -> None:
    """Wait until every client's request runs, or has finished: a slow machine may finish one before it begins the next."""

    def accepted() -> bool:
        finished = service.metric('skiff_finished_requests_total{finish_reason="length"}')
        return service.metric("skiff_requests_running") + finished == CLIENTS

    await asyncio.to_thread(wait_until, accepted)


def make_client(service: Service) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=120)


@pytest.mark.parametrize(
    "victim",
    [
        "api",
        "detokenizer",
        pytest.param("tokenizer0", marks=pytest.mark.soak),
        pytest.param("rank0", marks=pytest.mark.soak),
    ],
)
def test_killed_child_ends_the_service_and_every_client_gets_an_error(model: Path, victim: str) -> None:
    """``tests/gpu/test_rank_faults.py`` does this to one rank of several, ``tests/reliability`` stops the tokenizer."""

    async def scenario(service: Service) -> list[Any]:
        async with make_client(service) as client:
            requests = [asyncio.ensure_future(ask(client, number, 2000)) for number in range(CLIENTS)]
            await wait_all_accepted(service)
            service.children[victim].kill()
            return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), HANG_SECONDS)

    with running_service(model, *FLAGS) as service:
        children = list(service.children.values())
        run_dir = Path(children[0].cmdline()[5])
        ends = asyncio.run(scenario(service))
        assert len(children) == 4
        assert [end for end in ends if not isinstance(end, APIError)] == []
        assert service.wait_exit() == EXIT_CHILD_DIED
        assert [child for child in children if is_alive(child)] == []
        assert not run_dir.exists()
        reasons = re.findall(r"service_failed reason=\"(.*)\"", service.log_text())
        assert reasons == [f"{victim} was killed by SIGKILL"]
        if victim != "api":
            assert [end for end in ends if "was killed by SIGKILL" not in str(end)] == []


OUTPUTS: Final = [4000] + [250] * (CLIENTS - 1)
"""Tokens of the answers during a drain: one goes on until a new request was refused, a second or more after the drain began."""


def test_sigterm_finishes_running_requests_and_refuses_new_ones(model: Path) -> None:
    async def scenario(service: Service) -> list[int]:
        async with make_client(service) as client:
            requests = [asyncio.ensure_future(ask(client, *each)) for each in enumerate(OUTPUTS)]
            await wait_all_accepted(service)
            service.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(wait_until, lambda: is_draining(service))
            with pytest.raises(APIStatusError) as caught:
                while True:  # until none has come for a second, requests are still accepted
                    assert await ask(client, 1, 1) == 1
                    await asyncio.sleep(1.1 * QUIET_SECONDS)
            assert caught.value.status_code == 503
            assert not requests[0].done()
            return await asyncio.gather(*requests)

    with running_service(model, *FLAGS, "--drain-timeout-seconds", "300") as service:
        children = list(service.children.values())
        assert asyncio.run(scenario(service)) == OUTPUTS
        assert service.wait_exit() == EXIT_OK
        assert [child for child in children if is_alive(child)] == []


def is_draining(service: Service) -> bool:
    return service.http.get(service.url + "/readyz").status_code == 503


def test_too_long_socket_directory_is_refused_by_name(
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
