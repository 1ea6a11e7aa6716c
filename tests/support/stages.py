"""Clients of one service whose requests are at every stage of processing at one moment."""

import asyncio
import contextlib
import time
from dataclasses import dataclass
from typing import Any, Final

import psutil
from answers import Answer, read_answer
from raw_http import HANG_SECONDS, Address, RawConnection, address_of, post
from service import Service, wait_until

EACH: Final = 2
"""Clients at each stage, one streamed and one not; only one prompt is computed at a time."""
RUNNING: Final = 2 * EACH + 1
"""Running requests under ``SERVICE_FLAGS``: those at the three stages that hold a slot."""
CONTEXT: Final = 8192
SERVICE_FLAGS: Final = (
    "--served-model-name",
    "tiny",
    "--max-running-requests",
    str(RUNNING),
    "--max-queued-requests",
    "256",
    "--max-num-batched-tokens",
    "32",
    "--max-total-tokens",
    str(CONTEXT * (RUNNING + EACH)),
)
PAUSE_SECONDS: Final = 0.05
READ_SECONDS: Final = 0.005
SLOW_BUFFER_BYTES: Final = 4096
_TIMEOUT_HEADER: Final = "x_request_timeout_seconds"


@dataclass(frozen=True, slots=True)
class Ending:
    """The outcome of one client."""

    stage: str
    answer: Answer | None
    """None if there was no end within ``HANG_SECONDS``."""
    seconds: float

    def __str__(self) -> str:
        if self.answer is None:
            return f"{self.stage}: hung"
        outcome = self.answer.error or ("cut" if self.answer.cut else "finished")
        return f"{self.stage}: {self.answer.status} {outcome} after {self.seconds:.1f} s"


class Clients:
    """Opens clients stage by stage. Each request has a deadline."""

    def __init__(self, service: Service, deadline_seconds: float, salt: int) -> None:
        """``salt`` makes the prompts and schemas of several runs against one service differ."""
        self._service = service
        self._address: Address = address_of(service.url)
        self._tokenizer = service.children["tokenizer0"]
        self._deadline = str(deadline_seconds)
        self._salt = salt
        self._endings: list[asyncio.Task[Ending]] = []

    async def place(self) -> None:
        """Bring two clients to each stage. The last ones wait for a suspended tokenizer until ``release``."""
        for number in range(EACH):
            line = await self._send(
                "slow_reader", stream=True, **_long(number + 20), buffer=SLOW_BUFFER_BYTES
            )
            await line.begun()
        for number in range(EACH):
            await self._send("decoding", stream=bool(number), **_long(number + 40))
        await self._until("skiff_requests_running", 2 * EACH)
        ids = [self._salt % 300 + 10] * (CONTEXT - 100)
        await self._send("prefill", stream=bool(self._salt % 2), token_ids=ids, max_tokens=64)
        await self._until("skiff_requests_running", RUNNING)
        for number in range(EACH):
            await self._send("queued", stream=bool(number), **_long(number + 60))
        await self._until("skiff_requests_queued", EACH)
        self._tokenizer.suspend()
        await self._send("tokenizing", stream=False, text="The small boat " * 500, max_tokens=4)
        schema = {"type": "object", "properties": {f"a{self._salt}": {"type": "integer"}}}
        await self._send("tokenizing", stream=True, text="x", guided_json=schema, max_tokens=4)
        await self._until("skiff_requests_in_flight", RUNNING + 2 * EACH)

    def release(self) -> None:
        """Resume the tokenizer, if it still exists."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._tokenizer.resume()

    async def pour(self, count: int) -> None:
        """Send many small requests without waiting for their answers."""
        for number in range(count):
            try:
                await self._send("flood", stream=False, token_ids=[number % 300 + 10], max_tokens=2)
            except OSError:
                return  # the service is gone

    async def endings(self) -> list[Ending]:
        """Return the endings of all clients."""
        return list(await asyncio.gather(*self._endings))

    async def _send(
        self, stage: str, *, stream: bool, buffer: int | None = None, **fields: Any
    ) -> RawConnection:
        line = await RawConnection.open(self._address, receive_buffer_bytes=buffer)
        line.send(post("/generate", {**fields, "stream": stream}, **{_TIMEOUT_HEADER: self._deadline}))
        self._endings.append(asyncio.ensure_future(self._follow(stage, line)))
        return line

    async def _follow(self, stage: str, line: RawConnection) -> Ending:
        began = time.monotonic()
        slow = asyncio.ensure_future(_read_slowly(line)) if stage == "slow_reader" else None
        try:
            answer = read_answer(await line.reply(HANG_SECONDS))
        except TimeoutError:
            return Ending(stage, None, time.monotonic() - began)
        finally:
            if slow is not None:
                slow.cancel()
            line.cut()
        return Ending(stage, answer, time.monotonic() - began)

    async def _until(self, metric: str, value: int) -> None:
        await asyncio.to_thread(wait_until, lambda: self._service.metric(metric) == value)


def _long(token: int) -> dict[str, Any]:
    """Return a request that generates longer than any test runs."""
    return {"token_ids": [token] * 8, "max_tokens": 2000, "ignore_eos": True}


async def _read_slowly(line: RawConnection) -> None:
    """Read in short intervals only, so that the server's writes block."""
    await line.begun()
    while not line.lost:
        line.pause()
        await asyncio.sleep(PAUSE_SECONDS)
        line.resume()
        await asyncio.sleep(READ_SECONDS)
