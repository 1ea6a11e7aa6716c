"""API keys, deadlines, aborts, cache flushes and heartbeats of a whole service with the demo model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from openai import OpenAI
from service import Service, running_service, wait_until

pytestmark = pytest.mark.integration

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
        # With a bound, because other tests may run on the same GPU.
        with running_service("demo://", "--max-total-tokens", "65536") as service:
            service.http.headers["authorization"] = f"Bearer {KEY}"
            yield service


def post(
    service: Service, path: str, headers: dict[str, str] | None = None, **body: object
) -> httpx.Response:
    return service.http.post(service.url + path, json=body, headers=headers)


def is_idle(service: Service) -> bool:
    in_use = 'skiff_kv_cache_pages{state="used"}'
    return service.metric("skiff_requests_in_flight") == service.metric(in_use) == 0


def test_requests_need_a_key_that_no_log_or_command_line_shows(service: Service) -> None:
    assert httpx.get(service.url + "/v1/models").status_code == 401
    client = OpenAI(base_url=service.url + "/v1", api_key=KEY, max_retries=0)
    assert [model.id for model in client.models.list()] == [MODEL]
    assert KEY not in service.log_text()
    assert not [child for child in service.children.values() if KEY in " ".join(child.cmdline())]


def test_deadline_ends_a_decoding_request_with_its_tokens_so_far(service: Service) -> None:
    """The time to the first token depends on the machine, so the deadline grows until a token comes before it."""
    for seconds in (0.4, 0.8, 1.6, 3.2, 6.4):
        reply = post(service, "/v1/completions", {"X-Request-Timeout-Seconds": str(seconds)}, **LONG).json()
        [choice] = reply["choices"]
        assert choice["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] < LONG["max_tokens"]
        if choice["text"]:
            break
    assert choice["text"] and reply["usage"]["completion_tokens"]
    wait_until(lambda: is_idle(service))


def test_deadlines_end_running_and_queued_requests(service: Service) -> None:
    """There are more requests than may run at a time, so some end while they wait."""
    ended = 'skiff_aborted_requests_total{reason="deadline"}'
    before = service.metric(ended)
    with ThreadPoolExecutor(80) as pool:
        replies = [
            pool.submit(post, service, "/v1/completions", {"X-Request-Timeout-Seconds": "0.5"}, **LONG)
            for _ in range(80)
        ]
        choices = [each.result().json()["choices"][0] for each in replies]
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    wait_until(lambda: is_idle(service))
    assert service.metric(ended) == before + 80


def test_abort_ends_a_decoding_request(service: Service) -> None:
    with ThreadPoolExecutor(1) as pool:
        reply = pool.submit(post, service, "/v1/completions", {"X-Request-Id": "tale"}, **LONG)
        wait_until(lambda: service.metric("skiff_requests_running") == 1)
        assert post(service, "/abort", request_id="tale").json() == {"aborted": 1}
        [choice] = reply.result().json()["choices"]
    assert choice["finish_reason"] == "abort"
    wait_until(lambda: is_idle(service))


def test_repeated_prompt_is_cached_until_the_flush(service: Service) -> None:
    def count_cached_tokens() -> int:
        reply = post(service, "/v1/completions", model=MODEL, prompt=prompt, max_tokens=1).json()
        return int(reply["usage"]["prompt_tokens_details"]["cached_tokens"])

    prompt = "The quick brown fox jumps over the lazy dog, and then some. " * 4
    before = service.metric("skiff_cached_tokens_total")
    first, cached = count_cached_tokens(), count_cached_tokens()
    assert cached > first
    assert service.metric("skiff_cached_tokens_total") == before + first + cached
    flushed = post(service, "/flush_cache").json()
    assert flushed["pages"] >= cached // 16 and flushed["running"] == 0
    assert count_cached_tokens() == 0


def test_heartbeats_of_all_processes_are_metrics(service: Service) -> None:
    def age(process: str) -> float:
        return service.metric(f'skiff_process_heartbeat_age_seconds{{process="{process}"}}')

    for process in ("api", "tokenizer0", "detokenizer", "rank0"):
        wait_until(lambda process=process: age(process) < 5)  # type: ignore[misc]
        assert service.metric(f'skiff_process_up{{process="{process}"}}') == 1
