"""Probes of pods: a GET of the readiness path finds the pods that hang, drain or still load.

A pod is probed every ``PROBE_SECONDS``. The API process of a busy pod answers within milliseconds, so one that is silent for
``PROBE_TIMEOUT_SECONDS`` is ejected, and after ``HANG_PROBES`` of these its exchanges fail, too: a machine that is overloaded
may stall a pod for a time that its streams survive. The first good answer restores it.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from skiff_router.endpoints import PROBE_SECONDS, PROBE_TIMEOUT_SECONDS, Endpoint, Registry
from skiff_router.proxy import Exchanges
from skiff_router.upstream import ConnectionPool, UpstreamError, format_get
from skiff_router.whole_response import fetch
from skiff_runtime import contract, log

MAX_CONCURRENT_PROBES: Final = 64
MAX_RESPONSE_BYTES: Final = 1 << 20
HANG_PROBES: Final = 2
"""Probes that time out in a row before a pod counts as hung."""
STALL_SECONDS: Final = 0.25
"""A time-out that fires later than this was delayed by this process itself, which had no CPU time."""


class Prober:
    """Probes every pod of a registry, each by a connection of its own: those of requests may all be busy."""

    def __init__(self, registry: Registry, exchanges: Exchanges, get_key: Callable[[], str] = str) -> None:
        """``get_key``: returns the API key for a probe; Skiff's own probes need none, those of other servers may."""
        self._registry = registry
        self._exchanges = exchanges
        self._get_key = get_key
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_PROBES)
        self._pools: dict[Endpoint, ConnectionPool] = {}
        self._timeouts: dict[Endpoint, int] = {}
        """Probes that have timed out since the last one that did not."""

    async def run(self) -> None:
        """Probe for ever."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            endpoints = [endpoint for backend in self._registry.backends for endpoint in backend.endpoints]
            for gone in [endpoint for endpoint in self._pools if endpoint not in endpoints]:
                self._pools.pop(gone).close()
                self._timeouts.pop(gone, None)
            await asyncio.gather(*(self._probe(endpoint) for endpoint in endpoints))
            await asyncio.sleep(max(0.0, began + PROBE_SECONDS - loop.time()))

    async def _probe(self, endpoint: Endpoint) -> None:
        loop = asyncio.get_running_loop()
        async with self._slots:
            began = loop.time()
            try:
                status = await self._get(endpoint)
            except TimeoutError:
                if loop.time() - began > PROBE_TIMEOUT_SECONDS + STALL_SECONDS:
                    return  # this process stood still, and the answer may wait to be read: the next probe decides
                count = self._timeouts[endpoint] = self._timeouts.get(endpoint, 0) + 1
                self._eject(endpoint, f"no answer to a probe within {PROBE_TIMEOUT_SECONDS:g} s")
                if count >= HANG_PROBES:
                    self._exchanges.fail(endpoint, f"the pod hangs: no answer to {count} probes in a row")
                return
            except UpstreamError as error:
                self._timeouts.pop(endpoint, None)
                self._eject(endpoint, str(error))
                return
        self._timeouts.pop(endpoint, None)
        if status == 200:
            if endpoint.ejected or endpoint.draining:
                log.event("pod_restored", pod=endpoint.name)
            endpoint.restore()
        elif not endpoint.draining:
            log.event("pod_not_ready", pod=endpoint.name, status=status)
            endpoint.drain()

    def _eject(self, endpoint: Endpoint, reason: str) -> None:
        if not endpoint.ejected:
            log.warning("pod_ejected", pod=endpoint.name, reason=reason)
        endpoint.eject()

    async def _get(self, endpoint: Endpoint) -> int:
        """Return the status of the readiness path."""
        pool = self._pools.setdefault(endpoint, ConnectionPool(endpoint.address))
        request = format_get(endpoint.address, contract.PATH_READYZ, self._get_key())
        status, _ = await fetch(pool, request, seconds=PROBE_TIMEOUT_SECONDS, limit=MAX_RESPONSE_BYTES)
        return status
