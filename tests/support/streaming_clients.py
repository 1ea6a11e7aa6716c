"""Streaming clients of one service that all run when a fault begins, and the end of each."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from answers import Answer, read_answer
from raw_http import RawConnection, address_of, post
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


def collect_ends(service: Service, fault: Callable[[], object], *, tokens: int) -> list[StreamEnd]:
    """Open streams of ``tokens`` tokens, which must outlast the test; begin the fault when all run, and return their ends."""
    return asyncio.run(_collect_ends(service, fault, tokens))


async def _collect_ends(service: Service, fault: Callable[[], object], tokens: int) -> list[StreamEnd]:
    address = address_of(service.url)
    lines = [await RawConnection.open(address) for _ in range(CLIENTS)]
    for number, line in enumerate(lines):
        line.send(post("/generate", _make_request(number, tokens)))
    for line in lines:
        await line.begun()
    await asyncio.to_thread(wait_until, lambda: service.metric("skiff_requests_running") == CLIENTS)
    began = time.monotonic()
    await asyncio.to_thread(fault)
    return await asyncio.gather(*(_follow(line, began) for line in lines))


async def _follow(line: RawConnection, began: float) -> StreamEnd:
    try:
        answer = read_answer(await line.reply())
    except TimeoutError:
        answer = None
    finally:
        line.cut()
    return StreamEnd(answer, time.monotonic() - began)


def _make_request(number: int, tokens: int) -> dict[str, Any]:
    return {"token_ids": [number + 10] * 8, "max_tokens": tokens, "ignore_eos": True, "stream": True}
