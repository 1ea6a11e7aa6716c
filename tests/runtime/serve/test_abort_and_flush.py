"""Deadlines, aborts, flushes, keys and heartbeats against a whole service with the demo model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI
from service import Service, running_service, wait_until

MODEL = "skiff-demo"
LONG: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once upon a time",
    "max_tokens": 2000,
    "ignore_eos": True,
    "temperature": 0,
}
KEY = "sk-whole"


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIFF_API_KEY", f"sk-other,{KEY}")
        with running_service("demo://") as service:
            service.http.headers["authorization"] = f"Bearer {KEY}"
            yield service


def post(
    service: Service, path: str, headers: dict[str, str] | None = None, **body: object
) -> httpx.Response:
    return service.http.post(service.url + path, json=body, headers=headers)


def idle(service: Service) -> bool:
    in_use = 'skiff_kv_cache_pages{state="used"}'
    return service.metric("skiff_requests_in_flight") == service.metric(in_use) == 0


def test_keys(service: Service) -> None:
    assert httpx.get(service.url + "/v1/models").status_code == 401
    client = OpenAI(base_url=service.url + "/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert KEY not in service.log_text()
    assert not [child for child in service.children.values() if KEY in " ".join(child.cmdline())]


def test_a_deadline_while_decoding(service: Service) -> None:
    """How soon a first token comes, the machine decides; so the deadline grows until one comes before it."""
    for seconds in (0.4, 0.8, 1.6, 3.2, 6.4):
        reply = post(service, "/v1/completions", {"X-Request-Timeout-Seconds": str(seconds)}, **LONG).json()
        [choice] = reply["choices"]
        assert choice["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] < LONG["max_tokens"]
        if choice["text"]:
            break
    assert choice["text"] and reply["usage"]["completion_tokens"]
    wait_until(lambda: idle(service))


def test_deadlines_of_many_end_all_of_them(service: Service) -> None:
    """More than may run at a time: some end while they wait."""
    ended = 'skiff_aborted_requests_total{reason="deadline"}'
    before = service.metric(ended)
    with ThreadPoolExecutor(80) as pool:
        asked = [
            pool.submit(post, service, "/v1/completions", {"X-Request-Timeout-Seconds": "0.5"}, **LONG)
            for _ in range(80)
        ]
        choices = [each.result().json()["choices"][0] for each in asked]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    wait_until(lambda: idle(service))
    assert service.metric(ended) == before + 80


def test_an_abort_while_decoding(service: Service) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, service, "/v1/completions", {"X-Request-Id": "tale"}, **LONG)
        wait_until(lambda: service.metric("skiff_requests_running") == 1)
        assert post(service, "/abort", request_id="tale").json() == {"aborted": 1}
        [choice] = asked.result().json()["choices"]
    assert choice["finish_reason"] == "abort"
    wait_until(lambda: idle(service))


def test_a_flush_frees_what_nobody_holds(service: Service) -> None:
    prompt = "The quick brown fox jumps over the lazy dog, and then some. " * 4
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    post(service, "/v1/completions", **body)
    cached = post(service, "/v1/completions", **body).json()["usage"]["prompt_tokens_details"][
        "cached_tokens"
    ]
    assert cached > 0
    flushed = post(service, "/flush_cache").json()
    assert flushed["pages"] >= cached // 16 and flushed["running"] == 0
    again = post(service, "/v1/completions", **body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert again == 0


def test_heartbeats_are_told(service: Service) -> None:
    def age(process: str) -> float:
        return service.metric(f'skiff_process_heartbeat_age_seconds{{process="{process}"}}')

    for process in ("api", "tokenizer0", "detokenizer", "rank0"):
        wait_until(lambda process=process: age(process) < 5)  # type: ignore[misc]
        assert service.metric(f'skiff_process_up{{process="{process}"}}') == 1
