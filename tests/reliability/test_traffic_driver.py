"""The traffic driver against a server that fails in every way: each failure is counted by its kind, and no arrival is lost."""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from traffic import (
    ENDPOINTS,
    Answer,
    Client,
    Control,
    Driver,
    Failure,
    Kind,
    RequestFailed,
    make_table,
    questions,
)

RIGHT = Answer("right", "stop")
HEAD = "HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
STREAM = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNK = 'data: {"choices": [{"text": "right", "finish_reason": "stop"}]}\n\n'


def plain(text: str, status: str = "200 OK", *, missing: int = 0) -> str:
    """Return a response with a completion; `missing` bytes of its body never come."""
    body = json.dumps({"choices": [{"text": text, "finish_reason": "stop"}]})
    return HEAD.format(status=status, length=len(body) + missing) + body


SCRIPTS = {
    "right": plain("right"),
    "streamed": STREAM + CHUNK + "data: [DONE]\n\n",
    "wrong": plain("wrong"),
    "reset": "",
    "cut": plain("right", missing=10),
    "busy": plain("right", "503 Service Unavailable"),
    "no end": STREAM + CHUNK,
    "error event": STREAM + CHUNK + 'data: {"error": {"message": "rank0 was killed"}}\n\n',
    "other shape": HEAD.format(status="200 OK", length=2) + "{}",
}


@asynccontextmanager
async def scripted_server(choose: Callable[[str], str | None]) -> AsyncIterator[str]:
    """Serve each prompt's script on one connection a request; None never answers."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            [length] = [
                int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line
            ]
            script = choose(json.loads(await reader.readexactly(length))["prompt"])
            if script is None:
                await reader.read()  # until the client leaves
            else:
                writer.write(script.encode())
                await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        ("reset", Failure.BEFORE),
        ("cut", Failure.AFTER),
        ("busy", f"{Failure.STATUS} 503"),
        ("no end", Failure.AFTER),
        ("error event", Failure.AFTER),
        ("other shape", Failure.WRONG),
    ],
)
def test_failures_have_kinds(script: str, kind: str) -> None:
    async def ask() -> Answer:
        async with scripted_server(SCRIPTS.__getitem__) as url:
            client = Client(url, "model")
            assert await client.ask(ENDPOINTS["completions"], "right", stream=False, kept=True) == RIGHT
            assert await client.ask(ENDPOINTS["completions"], "streamed", stream=True, kept=False) == RIGHT
            return await client.ask(
                ENDPOINTS["completions"], script, stream=script in ("no end", "error event"), kept=False
            )

    with pytest.raises(RequestFailed) as caught:
        asyncio.run(ask())
    assert caught.value.kind == kind


def test_a_refused_connection_is_named() -> None:
    with pytest.raises(RequestFailed) as caught:
        asyncio.run(
            Client("http://127.0.0.1:9", "model").ask(ENDPOINTS["chat"], "x", stream=False, kept=False)
        )
    assert caught.value.kind == Failure.CONNECT


def options(**changed: Any) -> argparse.Namespace:
    """Return the driver's options."""
    base = {"rate": 200.0, "requests": 40, "seconds": 30.0, "max_in_flight": 4, "retries": 0}
    return argparse.Namespace(**{**base, **changed})


def right_answers(text: str) -> dict[str, Any]:
    """Return the same right answer to every question."""
    return {"revision": {name: {question: [text, "stop"] for question in questions()} for name in ENDPOINTS}}


@pytest.fixture(autouse=True)
def only_completions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the mix have one endpoint, which the scripted server answers."""
    kinds = [Kind("completions", stream=False, kept=kept) for kept in (False, True)]
    monkeypatch.setattr("traffic.mix", lambda *, retries: list(kinds))


def test_arrivals_beyond_the_bound_are_reported() -> None:
    """The server answers nothing until the traffic stops: the bound is in flight, and all other arrivals are counted."""

    async def scenario() -> dict[str, Any]:
        async with scripted_server(lambda _: None) as url:
            driver = Driver(Client(url, "model"), right_answers("right"), options())
            running = asyncio.create_task(driver.run())
            async with asyncio.timeout(30):
                while driver.report()["not_sent"] < 36:  # noqa: ASYNC110 (the driver sends no event)
                    await asyncio.sleep(0.01)
            running.cancel()
            return driver.report()

    report = asyncio.run(scenario())
    assert (report["requests"], report["not_sent"], report["unanswered"]) == (4, 36, 4)


def test_marks_divide_the_report_into_windows() -> None:
    async def scenario() -> dict[str, Any]:
        answers = iter(["right"] * 10 + ["wrong"] * 10_000)
        async with scripted_server(lambda _: plain(next(answers))) as url:
            driver = Driver(
                Client(url, "model"), right_answers("right"), options(requests=10_000, max_in_flight=64)
            )
            server = await asyncio.start_server(Control(driver).handle, "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            async with server:
                running = asyncio.create_task(driver.run())
                await asyncio.sleep(0.2)
                assert await control(port, "POST /windows/roll%20out") == {"window": "roll out"}
                await asyncio.sleep(0.2)
                assert "error" in await control(port, "GET /nothing")
                report: dict[str, Any] = await control(port, "POST /stop")
                await running
                return report

    report = asyncio.run(scenario())
    assert [window["name"] for window in report["windows"]] == ["before", "roll out"]
    assert all(window["requests"] for window in report["windows"])
    assert (report["requests"] - report["failed"], report["unanswered"]) == (10, 0)
    assert report["windows"][1]["failures"] == {Failure.WRONG: report["windows"][1]["requests"]}
    assert f"| {report['requests']} |" in make_table({"edit": report}).splitlines()[-1]


async def control(port: int, request: str) -> Any:
    """Return the answer to one request of the control server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{request} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return json.loads(answer.split(b"\r\n\r\n", 1)[1])
