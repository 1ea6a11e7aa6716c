"""Reads the server's own report of its start, once for each pod that becomes ready: one GET of /startupz at the pod's IP.

The alternatives need more rights: the API server's proxy reaches every port of every pod, and an annotation needs a
token in the pod. The report is a courtesy: without a route to the pod, under a NetworkPolicy that forbids it or behind
a mesh, `status.startup` merely lacks the steps inside the server. So there are no retries, and reconciling never waits.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import aiohttp
import msgspec

from skiff_operator import metrics, startup
from skiff_operator.log import logger
from skiff_operator.observe import Observer, ReconcileRequest, StartedPod
from skiff_operator.pod_metrics import url_host
from skiff_operator.response_body import read_body
from skiff_operator.workqueue import Key
from skiff_runtime import contract

_TIMEOUT: Final = aiohttp.ClientTimeout(total=5, connect=2)
_CONCURRENT: Final = 8
_PENDING: Final = 512
"""Pods that wait to be read; more become ready at once only in a cluster-wide outage, and the rest go without."""
_MAX_BYTES: Final = 256 << 10


class StartupReader:
    """Observes the startup of each pod in the histogram, and completes it with the server's report."""

    def __init__(
        self,
        observer: Observer,
        enqueue: Callable[[ReconcileRequest], None],
        *,
        enabled: bool = True,
        port: int = contract.API_PORT,
    ) -> None:
        """Write to `observer`'s cache and queue what changed; without `enabled`, no pod is contacted."""
        self._observer = observer
        self._enqueue = enqueue
        self._enabled = enabled
        self._port = port
        self._slots = asyncio.Semaphore(_CONCURRENT)
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, key: Key, pod: StartedPod) -> None:
        """Observe a pod that has become ready, and read its report in the background."""
        _observe(pod.startup)
        if not self._enabled or len(self._tasks) >= _PENDING or not url_host(pod.ip):
            return
        task = asyncio.create_task(self._complete(key, pod))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def wait(self) -> None:
        """Wait until every pod that was begun has been read, or has failed to answer."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        """Cancel what is still being read."""
        for task in self._tasks:
            task.cancel()
        await self.wait()

    async def _complete(self, key: Key, pod: StartedPod) -> None:
        async with self._slots:
            try:
                body = await _get(pod.ip, self._port)
                completed = startup.with_server_steps(pod.startup, body)
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.MsgspecError, ValueError) as error:
                extra = {"object": f"{key[0]}/{pod.startup.pod}", "error": str(error) or type(error).__name__}
                logger.info("start phases not read", extra=extra)
                return
        known = pod.startup.seconds()
        for step, seconds in completed.seconds().items():
            if step not in known:
                metrics.pod_startup.labels(step).observe(seconds)
        request = self._observer.observe_startup(key, pod.uid, completed)
        if request is not None:
            self._enqueue(request)


def _observe(started: startup.PodStartup) -> None:
    for step, seconds in started.seconds().items():
        metrics.pod_startup.labels(step).observe(seconds)


async def _get(ip: str, port: int) -> bytes:
    """Return the body of /startupz. Raises `ValueError` for one that is too long or no success."""
    async with (
        aiohttp.ClientSession(
            timeout=_TIMEOUT, trust_env=False, cookie_jar=aiohttp.DummyCookieJar()
        ) as session,
        session.get(
            f"http://{url_host(ip)}:{port}{contract.PATH_STARTUPZ}", allow_redirects=False
        ) as response,
    ):
        if response.status != 200:
            raise ValueError(f"/startupz answered {response.status}")
        body = await read_body(response, _MAX_BYTES + 1)
        if len(body) > _MAX_BYTES:
            raise ValueError(f"/startupz sent more than {_MAX_BYTES} bytes")
        return body
