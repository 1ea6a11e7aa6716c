"""200 concurrent requests to a whole service: 50 clients disconnect, the others get the right tokens."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AsyncOpenAI, OpenAI
from service import Service, running_service, wait_until
from tiny_models import greedy_tokens, load_reference, make_model
from tokenizers import Tokenizer

pytestmark = pytest.mark.integration

NAME: Final = "tiny"
TOKENS: Final = 24
LONG: Final = 3000
PROMPTS: Final = (
    "The small boat",
    "The small boat crosses the harbour before",
    "A pod starts, a service answers,",
    "Tokens stream one after another until the model has said what it wanted to say.",
    "Grüße aus Köln, 東京の朝 🙂",
    "numbers 0123456789",
)
GREEDY: Final[dict[str, Any]] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str]:
    """Return the text of each prompt by transformers."""
    reference = load_reference(model)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    return {
        prompt: tokenizer.decode(greedy_tokens(reference, tokenizer.encode(prompt).ids, TOKENS))
        for prompt in PROMPTS
    }


@pytest.fixture(scope="module")
def service(model: Path) -> Iterator[Service]:
    flags = ("--served-model-name", NAME, "--max-total-tokens", "16384", "--log-level", "debug")
    with running_service(model, *flags, "--max-running-requests", "48") as service:
        yield service


def sync_request(service: Service, number: int, expected: dict[str, str]) -> None:
    """Send one request, streamed where ``number`` is odd; every fourth client disconnects midway."""
    prompt = PROMPTS[number % len(PROMPTS)]
    disconnects = number % 4 == 3
    with OpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        if not number % 2:
            whole = client.completions.create(model=NAME, prompt=prompt, max_tokens=TOKENS, **GREEDY)
            assert whole.choices[0].text == expected[prompt]
            return
        stream = client.completions.create(
            model=NAME, prompt=prompt, max_tokens=LONG if disconnects else TOKENS, stream=True, **GREEDY
        )
        if disconnects:
            next(stream)
            stream.close()
            return
        assert "".join(chunk.choices[0].text for chunk in stream) == expected[prompt]


async def async_request(client: AsyncOpenAI, number: int, expected: dict[str, str]) -> None:
    """Send one request, streamed where ``number`` is odd."""
    prompt = PROMPTS[number % len(PROMPTS)]
    if number % 2:
        stream = await client.completions.create(
            model=NAME, prompt=prompt, max_tokens=TOKENS, stream=True, **GREEDY
        )
        assert "".join([chunk.choices[0].text async for chunk in stream]) == expected[prompt]
        return
    whole = await client.completions.create(model=NAME, prompt=prompt, max_tokens=TOKENS, **GREEDY)
    assert whole.choices[0].text == expected[prompt]
    assert whole.usage is not None and whole.usage.completion_tokens == TOKENS


async def async_requests(service: Service, expected: dict[str, str]) -> None:
    """Run 75 clients that stay, and 25 that disconnect while the server generates a long answer."""
    async with AsyncOpenAI(
        base_url=service.url + "/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        disconnecting = [
            asyncio.ensure_future(
                client.completions.create(model=NAME, prompt=PROMPTS[0], max_tokens=LONG, **GREEDY)
            )
            for _ in range(25)
        ]
        await asyncio.to_thread(wait_until, lambda: service.metric("skiff_requests_in_flight") >= 25)
        staying = [asyncio.ensure_future(async_request(client, number, expected)) for number in range(75)]
        await asyncio.sleep(0.5)
        for each in disconnecting:
            assert each.cancel()
        await asyncio.gather(*staying)


def count_outcomes(service: Service) -> Counter[str]:
    """Return the number of completions that have ended so far, by outcome."""
    return Counter(
        {
            outcome: int(
                service.metric(f'skiff_requests_total{{endpoint="completions",outcome="{outcome}"}}')
            )
            for outcome in ("finished", "aborted", "failed", "rejected")
        }
    )


def test_200_concurrent_requests_of_which_50_disconnect(service: Service, expected: dict[str, str]) -> None:
    before = count_outcomes(service)
    with ThreadPoolExecutor(101) as pool:
        others = pool.submit(asyncio.run, async_requests(service, expected))
        wait_until(lambda: service.metric("skiff_requests_in_flight") >= 25)
        mine = [pool.submit(sync_request, service, number, expected) for number in range(100)]
        for each in [*mine, others]:
            each.result()
    wait_until(lambda: service.metric("skiff_requests_in_flight") == 0)
    assert count_outcomes(service) - before == {"finished": 150, "aborted": 50}
    check_nothing_held(service)


def check_nothing_held(service: Service) -> None:
    """Check that every page is free or cached, and that the idle scheduler's check of all pages (log level debug) passed."""
    wait_until(lambda: service.metric('skiff_kv_cache_pages{state="used"}') == 0)
    pages = sum(service.metric(f'skiff_kv_cache_pages{{state="{state}"}}') for state in ("free", "cached"))
    assert pages == 16384 / 16
    assert service.metric("skiff_requests_running") == service.metric("skiff_requests_queued") == 0
    time.sleep(1.2)
    assert service.http.get(service.url + "/health_generate", timeout=60).status_code == 200


def test_refused_requests_hold_nothing(service: Service, expected: dict[str, str]) -> None:
    """Requests that only the whole service can refuse, one of each kind, while a valid one runs."""
    bad: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {"prompt": "x " * 5000}, "context"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 5000}, "context"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "best_of": 3},
            "'best_of' is not supported",
        ),
        ("/generate", {"token_ids": []}, "prompt is empty"),
    ]
    with ThreadPoolExecutor(1) as pool:
        good = pool.submit(sync_request, service, 0, expected)
        for path, body, message in bad:
            named = body if path == "/generate" else {"model": NAME, **body}
            response = service.http.post(service.url + path, json=named, timeout=60)
            assert (response.status_code, message in response.json()["error"]["message"]) == (400, True), (
                response.text
            )
        good.result()
    check_nothing_held(service)
