"""Open-loop load generator: requests leave at their scheduled times, however slow the responses to earlier ones are."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from skiff_runtime.bench.online.http_client import HttpClient
from skiff_runtime.bench.online.request_record import RequestRecord


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """An encoded request, and its scheduled time in seconds after the start.

    ``expected_tokens``: number of tokens that the response must have, or None if the model may stop earlier.
    """

    at_seconds: float
    body: bytes
    expected_tokens: int | None


@dataclass(frozen=True, slots=True)
class LoadLimits:
    """Limits of a run: requests in flight (None for a truly open loop), and timeouts of a request and of the run."""

    max_concurrency: int | None
    request_seconds: float
    total_seconds: float


class LoadGenerator:
    """One run against one server. ``records`` grows as requests leave; ``unsent`` is known at the end."""

    def __init__(
        self, client: HttpClient, limits: LoadLimits, *, on_end: Callable[[RequestRecord], None]
    ) -> None:
        self.records: list[RequestRecord] = []
        self.peak_concurrency = 0
        self.unsent = 0
        self._client = client
        self._limits = limits
        self._on_end = on_end
        self._active = 0
        self._semaphore = asyncio.Semaphore(limits.max_concurrency) if limits.max_concurrency else None

    async def run(self, requests: Sequence[ScheduledRequest]) -> float:
        """Send all requests and wait for their responses. Returns the duration in seconds."""
        start = time.perf_counter()
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(self._limits.total_seconds):
                for request in requests:
                    await self._wait_until(start + request.at_seconds)
                    tasks.append(asyncio.create_task(self._run_request(request, start)))
                await asyncio.gather(*tasks)
        except TimeoutError:
            self.unsent = len(requests) - len(tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return time.perf_counter() - start

    async def _wait_until(self, moment: float) -> None:
        delay = moment - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
        if self._semaphore is not None:
            await self._semaphore.acquire()

    async def _run_request(self, request: ScheduledRequest, start: float) -> None:
        record = RequestRecord(start + request.at_seconds, request.expected_tokens)
        self.records.append(record)
        self._active += 1
        self.peak_concurrency = max(self.peak_concurrency, self._active)
        try:
            await self._send(request.body, record)
        finally:
            self._active -= 1
            if self._semaphore is not None:
                self._semaphore.release()
            self._on_end(record)

    async def _send(self, body: bytes, record: RequestRecord) -> None:
        try:
            abort = await self._client.send(body, record)
        except (OSError, TimeoutError) as error:
            record.fail("no connection", str(error) or "it took too long")
            return
        try:
            async with asyncio.timeout(self._limits.request_seconds):
                await record.done
        except TimeoutError:
            record.fail("timeout", f"no end within {self._limits.request_seconds:g} s")
            abort()
        except asyncio.CancelledError:
            record.fail("cut off", "the run's time was over")
            abort()
            raise
