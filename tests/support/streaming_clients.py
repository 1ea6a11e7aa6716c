"""Streaming clients of one service that all run when a fault begins, and the end of each."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from answers import Answer, read_answer
from raw_http import HANG_SECONDS, RawConnection, address_of, post
from service import Service, wait_until

CLIENTS: Final = 32


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The end of one stream, and the seconds from the fault to it. ``answer`` None: there was no end in time."""

    answer: Answer | None
    seconds: float

    @property
    def error(self) -> str | None:
        """The error of a stream that ended with exactly one terminal event; None of any other stream."""
        answer = self.answer
        return answer.error if answer is not None and answer.terminal else None


def collect_ends(
    service: Service,
    fault: Callable[[], object],
    *,
    clients: int = CLIENTS,
    timeout_seconds: float = HANG_SECONDS,
) -> list[StreamEnd]:
    """Open streams that last longer than any test, begin the fault when all of them run, and return their ends."""
    return asyncio.run(_collect_ends(service, fault, clients, timeout_seconds))


async def _collect_ends(
    service: Service, fault: Callable[[], object], clients: int, timeout_seconds: float
) -> list[StreamEnd]:
    address = address_of(service.url)
    lines = [await RawConnection.open(address) for _ in range(clients)]
    for number, line in enumerate(lines):
        line.send(post("/generate", _long_request(number)))
    for line in lines:
        await line.begun()
    await asyncio.to_thread(wait_until, lambda: service.metric("skiff_requests_running") == clients)
    began = time.monotonic()
    await asyncio.to_thread(fault)
    return await asyncio.gather(*(_follow(line, began, timeout_seconds) for line in lines))


async def _follow(line: RawConnection, began: float, timeout_seconds: float) -> StreamEnd:
    try:
        answer = read_answer(await line.reply(timeout_seconds))
    except TimeoutError:
        answer = None
    finally:
        line.cut()
    return StreamEnd(answer, time.monotonic() - began)


def _long_request(number: int) -> dict[str, Any]:
    return {"token_ids": [number + 10] * 8, "max_tokens": 3000, "ignore_eos": True, "stream": True}
