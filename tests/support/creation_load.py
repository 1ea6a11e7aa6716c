"""The load of the operator's bench: creations at a rate, and a watch that notes when Deployments appear."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
from apiserver import COLLECTIONS, credentials

CONCURRENCY = 16
TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10)


def body(name: str) -> dict[str, Any]:
    """A small InferenceService."""
    return {
        "apiVersion": "serving.skiff.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": {"model": {"uri": "demo://"}, "runtime": {"device": "cpu"}},
    }


def session(kubeconfig: Path) -> aiohttp.ClientSession:
    """A session with the API server."""
    server, context = credentials(kubeconfig)
    connector = aiohttp.TCPConnector(ssl=context, limit=CONCURRENCY + 1)
    return aiohttp.ClientSession(server, connector=connector, timeout=TIMEOUT, read_bufsize=2**20)


async def create_all(
    kubeconfig: Path, namespace: str, names: list[str], *, rate: float | None
) -> dict[str, float]:
    """Create an InferenceService per name, `rate` a second or as fast as it goes; when each was sent."""
    path = COLLECTIONS["inferenceservices"].format(namespace=namespace)
    sent: dict[str, float] = {}
    gate = asyncio.Semaphore(CONCURRENCY)
    started = time.perf_counter()

    async def create(http: aiohttp.ClientSession, name: str, number: int) -> None:
        if rate is not None:
            await asyncio.sleep(started + number / rate - time.perf_counter())
        async with gate:
            sent[name] = time.perf_counter()
            async with http.post(path, json=body(name)) as reply:
                reply.raise_for_status()

    async with session(kubeconfig) as http, asyncio.TaskGroup() as group:
        for number, name in enumerate(names):
            group.create_task(create(http, name, number))
    return sent


class DeploymentWatch:
    """Notes the time at which each Deployment of a namespace is first seen."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._http = session(kubeconfig)
        self._path = COLLECTIONS["deployments"].format(namespace=namespace)
        self._seen: dict[str, float] = {}
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "DeploymentWatch":
        async with self._http.get(self._path, params={"limit": "1"}) as reply:
            version = (await reply.json())["metadata"]["resourceVersion"]
        self._task = asyncio.create_task(self._watch(version))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
        await self._http.close()

    async def wait_for(self, names: list[str], timeout_seconds: float = 300.0) -> dict[str, float]:
        """When each of the Deployments was seen; waits until all have been."""
        try:
            async with asyncio.timeout(timeout_seconds), self._news:
                await self._news.wait_for(lambda: all(name in self._seen for name in names))
        except TimeoutError:
            missing = [name for name in names if name not in self._seen]
            raise AssertionError(f"no Deployment of {len(missing)} was seen: {missing[:5]}") from None
        return dict(self._seen)

    async def _watch(self, version: str) -> None:
        """Watch for ever; the server ends a watch whose reader falls behind, and it goes on from there."""
        while True:
            params = {"watch": "true", "resourceVersion": version}
            async with self._http.get(self._path, params=params) as reply:
                async for line in reply.content:
                    moment = time.perf_counter()
                    event = json.loads(line)
                    assert event["type"] != "ERROR", event
                    version = event["object"]["metadata"]["resourceVersion"]
                    await self._note(event["object"]["metadata"]["name"], moment)

    async def _note(self, name: str, moment: float) -> None:
        self._seen.setdefault(name, moment)
        async with self._news:
            self._news.notify_all()
