"""Replicas of a router share the limits of API keys. The tests use real sockets, and the last one kills a replica's process."""

import asyncio
import contextlib
import http.server
import json
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_pod import Answer, FakePod, PodRequest, json_response, pods
from free_port import free_port
from operator_process import eventually
from routers import RunningRouter, make_config, router, router_process, run, until

from skiff_router import key_usage
from skiff_router.config import RouterConfig
from skiff_router.upstream import Address

CHAT = "/v1/chat/completions"
HEADERS = {"authorization": "Bearer key-a"}


async def empty(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    writer.write(json_response(b"{}"))


async def never(request: PodRequest, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


class Replicas:
    """The files and ports of replicas that name each other as peers."""

    def __init__(self, directory: Path, limits: dict[str, Any], count: int = 2) -> None:
        self.keys, self.limits = directory / "keys", directory / "limits"
        self.keys.write_text("team-a: key-a\n")
        self.limits.write_text(json.dumps({"default": limits}))
        self.ports = [free_port() for _ in range(count)]

    def config(
        self, index: int, *addresses: Address, peers: tuple[Address, ...] | None = None
    ) -> RouterConfig:
        """Return the configuration of one replica. ``peers``: by default all of them."""
        return make_config(
            {"a": addresses},
            port=self.ports[index],
            api_key_file=str(self.keys),
            limits_file=str(self.limits),
            peers=tuple(Address("localhost", port) for port in self.ports) if peers is None else peers,
        )

    @contextlib.asynccontextmanager
    async def beside(self, answer: Answer) -> AsyncIterator[tuple[RunningRouter, FakePod]]:
        """Run one replica in front of a pod, with a peer that answers as a test chooses. Yields both."""
        async with (
            pods(empty, answer) as (pod, peer),
            router(self.config(0, pod.address, peers=(peer.address,))) as running,
        ):
            yield running, peer


async def know_each_other(*routers: RunningRouter) -> None:
    async def known() -> bool:
        pages = [await each.metrics() for each in routers]
        return all(page["skiff_router_peers"] == len(routers) - 1 for page in pages)

    await until(known)


@contextlib.asynccontextmanager
async def two_routers(replicas: Replicas, pod: FakePod) -> AsyncIterator[tuple[RunningRouter, RunningRouter]]:
    """Run two replicas in front of a pod, which know each other."""
    async with (
        router(replicas.config(0, pod.address)) as one,
        router(replicas.config(1, pod.address)) as two,
    ):
        await know_each_other(one, two)
        yield one, two


async def post(running: RunningRouter) -> httpx.Response:
    return await running.post(CHAT, {"model": "a"}, headers=HEADERS)


async def read_usage(running: RunningRouter, version: int = -1, router_id: str = "") -> dict[str, Any]:
    page = await running.client.get(f"/key-usage?router={router_id}&version={version}")
    report: dict[str, Any] = page.json()
    return report


def test_requests_a_minute_are_those_of_all_replicas(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, {"requestsPerMinute": 4})

    async def test() -> None:
        async with (
            pods(empty) as (pod,),
            two_routers(replicas, pod) as (one, two),
        ):
            assert [(await post(each)).status_code for each in (one, one, two, two)] == [200] * 4

            async def known() -> bool:
                left = [(await read_usage(each))["keys"]["team-a"]["requests_left"] for each in (one, two)]
                return bool(max(left) < 1)

            await until(known)
            replies = [await post(each) for each in (one, two)]
            assert [reply.status_code for reply in replies] == [429, 429]
            assert all(10 <= int(reply.headers["retry-after"]) <= 15 for reply in replies)
            assert len(pod.requests) == 4

    run(test())


def test_concurrency_is_that_of_all_replicas_and_freed_by_each(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, {"concurrency": 2})

    async def test() -> None:
        async with (
            pods(never) as (pod,),
            two_routers(replicas, pod) as (one, two),
        ):
            running = [asyncio.create_task(post(one)) for _ in range(2)]

            async def in_progress() -> bool:
                return bool((await read_usage(one))["keys"]["team-a"]["in_flight"] == 2)

            async def refused() -> bool:
                """Return whether the other one refuses a request; the client of one that it admits leaves."""
                try:
                    reply = await two.post(CHAT, {"model": "a"}, headers=HEADERS, timeout=0.3)
                except httpx.TimeoutException:
                    return False
                return reply.status_code == 429 and "has 2 requests in progress" in reply.text

            async def admitted() -> bool:
                return not await refused()

            await until(in_progress)
            await until(refused)
            running.pop().cancel()
            await until(admitted)
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    run(test())


def test_a_router_without_peers_reports_nothing(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, {"requestsPerMinute": 4})

    async def test() -> None:
        async with router(replicas.config(0, Address("127.0.0.1", 1), peers=())) as one:
            assert (await one.client.get("/key-usage", headers=HEADERS)).status_code == 404
            assert "skiff_router_peers" not in await one.metrics()

    run(test())


def test_only_so_many_requests_wait_for_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = Replicas(tmp_path, {"requestsPerMinute": 4})
    monkeypatch.setattr(key_usage, "MAX_WAITING", 2)

    async def test() -> None:
        async with pods(empty) as (pod,), router(replicas.config(0, pod.address)) as one:
            first = await read_usage(one)
            waiting = [
                asyncio.create_task(read_usage(one, first["version"], first["router"])) for _ in range(2)
            ]

            async def full() -> bool:
                return one.server._key_usage._waiting == 2

            await until(full)
            async with asyncio.timeout(2):
                beyond = await read_usage(one, first["version"], first["router"])
            assert beyond["keys"] == {} and not any(task.done() for task in waiting)
            assert (await post(one)).status_code == 200
            assert [(await task)["keys"]["team-a"]["requests"] for task in waiting] == [1, 1]

    run(test())


def test_report_waits_for_a_change_and_is_whole_for_another_process(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, {"requestsPerMinute": 4})

    async def test() -> None:
        async with pods(empty) as (pod,), router(replicas.config(0, pod.address)) as one:
            first = await read_usage(one)
            assert [usage["requests"] for usage in first["keys"].values()] == [0]
            waiting = asyncio.create_task(read_usage(one, first["version"], first["router"]))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            assert (await post(one)).status_code == 200
            report = await waiting
            assert report["keys"]["team-a"]["requests"] == 1
            assert 3.0 <= report["keys"]["team-a"]["requests_left"] < 3.9
            again = await read_usage(one, report["version"] + 7, "another process")
            assert again["keys"]["team-a"]["requests"] == 1
            reply = await one.client.get("/key-usage?version=none")
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "version"
            assert "key-a" not in json.dumps(report)

    run(test())


@pytest.mark.parametrize(
    "body", [b"{", b"{}", json.dumps({"router": "x", "version": "1"}).encode(), b"[" * 9999]
)
def test_peer_that_is_no_router_does_not_count(tmp_path: Path, body: bytes) -> None:
    replicas = Replicas(tmp_path, {"requestsPerMinute": 2})

    async def wrong(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(json_response(body))

    async def test() -> None:
        async with replicas.beside(wrong) as (one, peer):

            async def asked() -> bool:
                return len(peer.requests) >= 2

            await until(asked)
            assert (await one.metrics())["skiff_router_peers"] == 0
            assert [(await post(one)).status_code for _ in range(3)] == [200, 200, 429]

    run(test())


def test_peer_is_asked_at_intervals_however_often_it_changes(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, {"requestsPerMinute": 2})
    asked: list[float] = []

    async def changes(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        asked.append(time.monotonic())
        writer.write(
            json_response(json.dumps({"router": "other", "version": len(asked), "keys": {}}).encode())
        )

    async def test() -> None:
        async with replicas.beside(changes):

            async def often() -> bool:
                return len(asked) >= 11

            await until(often)
            assert asked[10] - asked[0] >= 10 * key_usage.REPORT_SECONDS * 0.9

    run(test())


def test_peer_cannot_use_names_that_have_no_key(tmp_path: Path) -> None:
    replicas = Replicas(tmp_path, {"requestsPerMinute": 2})
    usage = {"requests": 2, "tokens": 0, "in_flight": 0, "requests_left": 0.0, "tokens_left": None}
    report = {"router": "other", "version": 1, "keys": {"team-a": usage, "stranger": usage}}

    async def answer(request: PodRequest, writer: asyncio.StreamWriter) -> None:
        if "version=1" in request.target:
            await asyncio.Event().wait()
        writer.write(json_response(json.dumps(report).encode()))

    async def test() -> None:
        async with replicas.beside(answer) as (one, _):

            async def known() -> bool:
                return (await one.metrics())["skiff_router_peers"] == 1

            await until(known)
            assert (await post(one)).status_code == 429
            assert "stranger" not in (await one.client.get("/metrics")).text

    run(test())


class HangingPod(http.server.BaseHTTPRequestHandler):
    """A pod that is ready, and never answers a request."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.server.released.wait(60)  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hanging_pod() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), HangingPod) as server:
        server.daemon_threads = True
        server.released = threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.released.set()  # type: ignore[attr-defined]
        server.shutdown()


def test_requests_of_a_killed_replica_end_and_their_use_stays_counted(
    tmp_path: Path, hanging_pod: str
) -> None:
    """Processes: one is killed with a request in progress, and its successor takes over what is left."""
    replicas = Replicas(tmp_path, {"requestsPerMinute": 6, "concurrency": 1})
    flags = [
        f"--backend=a={hanging_pod}",
        f"--api-key-file={replicas.keys}",
        f"--limits-file={replicas.limits}",
        *(f"--peers=127.0.0.1:{port}" for port in replicas.ports),
    ]

    def ask(url: str, timeout: float = 0.5) -> int:
        """Return the status of a request, 0 if it was admitted: its client leaves after ``timeout`` seconds."""
        try:
            return httpx.post(url + CHAT, json={"model": "a"}, headers=HEADERS, timeout=timeout).status_code
        except httpx.TransportError:
            return 0

    def knows_a_peer(url: str) -> bool:
        return "skiff_router_peers 1.0" in httpx.get(f"{url}/metrics").text

    def left(url: str) -> float:
        return float(httpx.get(f"{url}/key-usage").json()["keys"]["team-a"]["requests_left"])

    with router_process(*flags, f"--port={replicas.ports[0]}") as (one, _):
        with router_process(*flags, f"--port={replicas.ports[1]}") as (two, pid):
            eventually(lambda: knows_a_peer(one) and knows_a_peer(two), "they know each other")
            assert [ask(two), ask(two)] == [0, 0]
            in_progress = threading.Thread(target=ask, args=(two, 60.0))
            in_progress.start()
            eventually(lambda: left(one) < 3.9, "the other one has heard of all three")
            assert ask(one, 30.0) == 429, "one of them is in progress"
            os.kill(pid, signal.SIGKILL)
            eventually(lambda: not knows_a_peer(one), "it is gone")
            assert ask(one) == 0
            in_progress.join()
        with router_process(*flags, f"--port={replicas.ports[1]}") as (two, _):
            eventually(lambda: knows_a_peer(one) and knows_a_peer(two), "its successor is known")
            eventually(lambda: left(two) < 4, "and knows what is left")
