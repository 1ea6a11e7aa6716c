"""The open loop: requests leave when they are due, whatever became of those before them."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skiff_runtime.bench.online.http_client import Target
from skiff_runtime.bench.online.request_record import Exchange


@dataclass(frozen=True, slots=True)
class Due:
    """A request and when it leaves, in seconds after the start."""

    at_seconds: float
    body: bytes
    wanted_tokens: int | None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a run. ``concurrency`` None is a truly open loop; ``request_seconds`` and ``total_seconds`` cut off."""

    concurrency: int | None
    request_seconds: float
    total_seconds: float


class Load:
    """One run against one target. ``exchanges`` grows as requests leave."""

    def __init__(self, target: Target, limits: Limits, *, on_end: Callable[[Exchange], None]) -> None:
        self.exchanges: list[Exchange] = []
        self.peak_concurrency = 0
        self.unsent = 0
        self._target = target
        self._limits = limits
        self._on_end = on_end
        self._active = 0
        self._places = asyncio.Semaphore(limits.concurrency) if limits.concurrency else None

    async def run(self, dues: Sequence[Due]) -> float:
        """Send everything and wait for all answers; the seconds that it took."""
        start = time.perf_counter()
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(self._limits.total_seconds):
                for due in dues:
                    await self._wait_until(start + due.at_seconds)
                    tasks.append(asyncio.create_task(self._one(due, start)))
                await asyncio.gather(*tasks)
        except TimeoutError:
            self.unsent = len(dues) - len(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return time.perf_counter() - start

    async def _wait_until(self, moment: float) -> None:
        delay = moment - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        if self._places is not None:
            await self._places.acquire()

    async def _one(self, due: Due, start: float) -> None:
        exchange = Exchange(start + due.at_seconds, due.wanted_tokens)
        self.exchanges.append(exchange)
        self._active += 1
        self.peak_concurrency = max(self.peak_concurrency, self._active)
        try:
            await self._follow(due.body, exchange)
        finally:
            self._active -= 1
            if self._places is not None:
                self._places.release()
            self._on_end(exchange)

    async def _follow(self, body: bytes, exchange: Exchange) -> None:
        try:
            cut = await self._target.send(body, exchange)
        except (OSError, TimeoutError) as error:
            exchange.fail("no connection", str(error) or "it took too long")
            return
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                await exchange.done
        except TimeoutError:
            exchange.fail("timeout", f"no end within {self._limits.request_seconds:g} s")
            cut()
        except asyncio.CancelledError:
            exchange.fail("cut off", "the run's time was over")
            cut()
            raise
