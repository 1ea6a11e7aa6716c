"""Limits, token counts and the usage log through a router: nothing leaks, nothing is counted twice, no key is shown."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_pod import STREAM_HEAD, Answer, PodRequest, chunk, event, json_response, pods
from routers import RunningRouter, make_config, router, run, until

CHAT = "/v1/chat/completions"
USAGE = {"prompt_tokens": 12, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}


async def empty(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(json_response(b"{}"))


class Setting:
    """Files of a router with two keys: ``key-a`` of team-a and ``key-0`` without a name."""

    def __init__(self, directory: Path) -> None:
        self.keys = directory / "keys"
        self.limits = directory / "limits"
        self.usage = directory / "usage"
        self.keys.write_text("team-a: key-a\nkey-0\n")

    def config(self, addresses: tuple[Any, ...], limits: dict[str, Any] | None = None) -> Any:
        self.limits.write_text(json.dumps(limits or {}))
        return make_config(
            {"a": addresses},
            api_key_file=str(self.keys),
            limits_file=str(self.limits),
            usage_log=str(self.usage),
        )

    async def lines(self, count: int) -> list[dict[str, Any]]:
        """Return the lines of the usage log, once there are ``count``."""

        async def written() -> bool:
            return self.usage.read_text().count("\n") >= count

        await until(written)
        text = self.usage.read_text()
        assert "key-a" not in text and "key-0" not in text
        lines = [json.loads(line) for line in text.splitlines()]
        assert len(lines) == count
        return lines


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting(tmp_path)


async def post(running: RunningRouter, key: str = "key-a", path: str = CHAT, **body: Any) -> httpx.Response:
    return await running.post(path, {"model": "a", **body}, headers={"authorization": f"Bearer {key}"})


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_request_beyond_a_limit_gets_a_429_with_retry_after(setting: Setting, path: str) -> None:
    async def test() -> None:
        async with pods(empty) as (pod,):
            config = setting.config((pod.address,), {"default": {"requestsPerMinute": 2}})
            async with router(config) as running:
                assert [(await post(running, path=path)).status_code for _ in range(2)] == [200, 200]
                reply = await post(running, path=path)
                assert reply.status_code == 429
                assert 25 <= int(reply.headers["retry-after"]) <= 30
                error = reply.json()["error"]
                assert error["type"] == "rate_limit_error"
                assert "'team-a' has used its 2 requests a minute" in error["message"]
                if path == CHAT:
                    assert error["code"] == "rate_limit_exceeded"
                assert (await post(running, "key-0", path)).status_code == 200
                assert len(pod.requests) == 3
                metrics = await running.metrics()
                limited = 'skiff_router_limited_requests_total{key="team-a",limit="requestsPerMinute"}'
                assert metrics[limited] == 1
                assert [line["status"] for line in await setting.lines(4)] == [200, 200, 429, 200]

    run(test())


async def breaks(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD + event("one"))
    await writer.drain()
    await asyncio.sleep(0.02)
    writer.transport.abort()


async def resets(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def fails(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(json_response(b"{}", "500 Internal Server Error"))


async def goes_on(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(STREAM_HEAD)
    while not writer.transport.is_closing():
        writer.write(event("more"))
        await writer.drain()
        await asyncio.sleep(0.01)


async def never(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize("answer", [empty, breaks, resets, fails, goes_on, never])
def test_concurrency_is_freed_however_a_request_ends(setting: Setting, answer: Answer) -> None:
    """Ended by the pod, by its failure, by retries, or by the client that leaves before or after the first byte."""

    async def test() -> None:
        async with pods(answer, answer) as (one, two):
            config = setting.config((one.address, two.address), {"default": {"concurrency": 1}})
            async with router(config) as running:

                async def idle() -> bool:
                    gauge = 'skiff_router_key_requests_in_flight{key="team-a"}'
                    return (await running.metrics()).get(gauge, 0.0) == 0  # missing before the first request

                for _ in range(3):
                    with pytest.raises((TimeoutError, httpx.HTTPError)):
                        async with asyncio.timeout(0.3):
                            reply = await post(running, stream=True)
                            assert reply.status_code != 429, reply.text
                            raise TimeoutError
                    await until(idle)
                for body in (b"{", b'{"model": "none"}'):
                    headers = {"authorization": "Bearer key-a"}
                    reply = await running.client.post(CHAT, content=body, headers=headers)
                    assert reply.status_code in (400, 404)
                await until(idle)

    run(test())


def test_concurrency_is_held_while_a_stream_runs(setting: Setting) -> None:
    async def test() -> None:
        async with pods(goes_on) as (pod,):
            config = setting.config((pod.address,), {"keys": {"team-a": {"concurrency": 1}}})
            async with router(config) as running:
                headers = {"authorization": "Bearer key-a"}
                body = b'{"model": "a", "stream": true}'
                async with running.client.stream("POST", CHAT, content=body, headers=headers) as reply:
                    await anext(reply.aiter_raw())
                    refused = await post(running)
                    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
                    assert "1 requests in progress" in refused.json()["error"]["message"]

    run(test())


def test_limits_and_keys_are_read_again(setting: Setting) -> None:
    async def test() -> None:
        async with pods(empty) as (pod,), router(setting.config((pod.address,))) as running:
            for _ in range(3):
                assert (await post(running)).status_code == 200
            setting.limits.write_text('{"keys": {"team-a": {"requestsPerMinute": 1}}}')

            async def limited() -> bool:
                return (await post(running)).status_code == 429

            await until(limited)
            reloaded = 'skiff_router_last_reload_successful{flag="--limits-file"}'
            assert (await running.metrics())[reloaded] == 1
            setting.limits.write_text('{"default": {"requestsPerMinute": -1}}')

            async def unusable() -> bool:
                return (await running.metrics())[reloaded] == 0

            await until(unusable)
            assert await limited(), "the last limits stay in force"
            setting.keys.write_text("team-a: key-b\n")

            async def rotated() -> bool:
                return (await post(running, "key-b")).status_code != 401

            await until(rotated)
            assert (await post(running, "key-b")).status_code == 429, "the name keeps its use"
            assert (await post(running)).status_code == 401

    run(test())


def streams(*pieces: bytes, head: bytes = STREAM_HEAD, end: bytes = b"0\r\n\r\n") -> Answer:
    async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for piece in pieces:
            await writer.drain()
            await asyncio.sleep(0.01)
            writer.write(chunk(piece))
        writer.write(end)

    return answer


def data(value: object, name: str = "") -> bytes:
    return (f"event: {name}\n" if name else "").encode() + f"data: {json.dumps(value)}\n\n".encode()


def with_header(head: bytes, name: str, value: str) -> bytes:
    return head.removesuffix(b"\r\n") + f"{name}: {value}\r\n\r\n".encode()


DONE = b"data: [DONE]\n\n"
TEXT = data({"choices": [{"delta": {"content": 'says "usage"'}}]})
TRAILER = b"0\r\nX-Skiff-Usage: prompt=12, cached=4, completion=5\r\n\r\n"
BEGUN = with_header(STREAM_HEAD, "x-skiff-usage", "prompt=12, cached=4")
MESSAGE = {"input_tokens": 8, "cache_read_input_tokens": 4, "output_tokens": 5}
RESPONSE = {"input_tokens": 12, "input_tokens_details": {"cached_tokens": 4}, "output_tokens": 5}


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(streams(TEXT, TEXT, DONE, head=BEGUN, end=TRAILER), id="trailer"),
        pytest.param(streams(TEXT, DONE, end=TRAILER), id="trailer-alone"),
        pytest.param(streams(TEXT, data({"choices": [], "usage": USAGE}), DONE), id="openai"),
        pytest.param(streams(TEXT, data({"choices": [], "usage": USAGE}) + DONE), id="openai-in-one-piece"),
        pytest.param(
            streams(
                TEXT,
                data({"type": "message_delta", "usage": MESSAGE}, "message_delta"),
                data({"type": "message_stop"}, "message_stop"),
            ),
            id="anthropic",
        ),
        pytest.param(
            streams(TEXT, data({"response": {"usage": RESPONSE}}, "response.completed")), id="responses"
        ),
    ],
)
def test_tokens_of_a_stream_are_counted_and_the_client_gets_its_bytes(
    setting: Setting, answer: Answer
) -> None:
    async def test() -> None:
        async with pods(answer) as (pod,), router(setting.config((pod.address,))) as running:
            reply = await post(running, stream=True)
            assert reply.content.startswith(TEXT)
            assert "x-skiff-usage" not in reply.headers and b"prompt=" not in reply.content
            assert pod.requests[0].headers["x-skiff-usage"] == "1"
            [line] = await setting.lines(1)
            assert line["key"] == "team-a" and line["model"] == line["service"] == "a"
            assert (line["endpoint"], line["status"], line["estimated"]) == (CHAT, 200, False)
            assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (12, 4, 5)
            assert line["id"] == reply.headers["x-request-id"] and 0 < line["seconds"] < 30
            metrics = await running.metrics()
            for kind, tokens in (("prompt", 12), ("cached", 4), ("completion", 5)):
                name = f'skiff_router_tokens_total{{key="team-a",kind="{kind}",model="a"}}'
                assert metrics[name] == tokens

    run(test())


@pytest.mark.parametrize(
    "answer",
    [
        json_response(json.dumps({"text": "x", "usage": USAGE}).encode()),
        with_header(json_response(b""), "x-skiff-usage", "prompt=12, cached=4, completion=5"),
    ],
)
def test_tokens_of_a_json_response_are_counted(setting: Setting, answer: bytes) -> None:
    async def send(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)

    async def test() -> None:
        async with pods(send) as (pod,), router(setting.config((pod.address,))) as running:
            reply = await post(running, "key-0")
            assert "x-skiff-usage" not in reply.headers
            [line] = await setting.lines(1)
            assert (line["key"], line["estimated"]) == ("unnamed", False)
            assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (12, 4, 5)

    run(test())


@pytest.mark.parametrize("head", [STREAM_HEAD, BEGUN], ids=["foreign", "skiff"])
def test_tokens_of_a_stream_whose_client_leaves_are_estimated(setting: Setting, head: bytes) -> None:
    """Otherwise a client that drops each stream before its last event would not be limited."""

    async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        for _ in range(10):
            writer.write(event("word"))
        await asyncio.Event().wait()

    async def test() -> None:
        async with pods(answer) as (pod,):
            config = setting.config((pod.address,), {"default": {"tokensPerMinute": 20}})
            async with router(config) as running:
                body = json.dumps({"model": "a", "stream": True, "prompt": "x" * 40}).encode()
                headers = {"authorization": "Bearer key-a"}
                async with running.client.stream("POST", CHAT, content=body, headers=headers) as reply:
                    seen = b""
                    async for piece in reply.aiter_raw():
                        seen += piece
                        if seen.count(b"\n\n") == 10:
                            break
                [line] = await setting.lines(1)
                prompt = len(body) // 4 if head is STREAM_HEAD else 12
                assert (line["prompt_tokens"], line["completion_tokens"]) == (prompt, 10)
                assert (line["status"], line["estimated"]) == (499, True)
                assert (await post(running)).status_code == 429

    run(test())


def test_failed_requests_cost_no_tokens(setting: Setting) -> None:
    async def test() -> None:
        async with pods(resets, fails) as (one, two):
            config = setting.config((one.address, two.address), {"default": {"tokensPerMinute": 20}})
            async with router(config) as running:
                for _ in range(3):
                    assert (await post(running)).status_code >= 500
                assert (await running.client.post(CHAT, content=b"{}")).status_code == 401
                lines = await setting.lines(3)
                assert {line["prompt_tokens"] + line["completion_tokens"] for line in lines} == {0}

    run(test())


def test_usage_log_that_is_moved_away_is_made_anew(setting: Setting) -> None:
    async def test() -> None:
        async with pods(empty) as (pod,), router(setting.config((pod.address,))) as running:
            await post(running)
            await setting.lines(1)
            os.rename(setting.usage, setting.usage.with_suffix(".1"))  # noqa: PTH104 (as logrotate does)
            await post(running)

            async def remade() -> bool:
                return setting.usage.exists()

            await until(remade)
            await setting.lines(1)

    run(test())


def test_without_keys_usage_has_no_name(setting: Setting) -> None:
    async def test() -> None:
        async with pods(streams(TEXT, end=TRAILER)) as (pod,):
            config = make_config({"a": (pod.address,)}, usage_log=str(setting.usage))
            async with router(config) as running:
                await running.post(CHAT, {"model": "a"})
                [line] = await setting.lines(1)
                assert (line["key"], line["prompt_tokens"]) == (None, 12)

    run(test())
