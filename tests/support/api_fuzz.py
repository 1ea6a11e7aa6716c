"""The API fuzzer: thousands of hostile requests, each response checked, while a well-behaved client streams."""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import itl_client
from fuzz_requests import MESSAGES, PAUSE_SECONDS, FuzzRequest, draw_request
from raw_http import Address, RawConnection, Reply

PROGRESS_SECONDS: Final = 10.0
MAX_EXAMPLES: Final = 10
SHOWN_BYTES: Final = 300
UNAVAILABLE: Final = 503


@dataclass
class Verdict:
    """Results: responses by status, requests by kind, and the first few wrong or missing responses."""

    statuses: Counter[int] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    problem_count: int = 0
    slowest_seconds: float = 0.0
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return the counts. Status 0 is no response, which only an incomplete request may get."""
        return {
            "requests": self.kinds.total(),
            "seconds": round(self.seconds, 1),
            "slowest_seconds": round(self.slowest_seconds, 3),
            "statuses": {str(status): self.statuses[status] for status in sorted(self.statuses)},
            "kinds": dict(sorted(self.kinds.items())),
            "problems": self.problem_count,
        }


def strike(address: Address, count: int, seed: int, concurrency: int) -> Verdict:
    """Send the requests from the calling process."""
    return asyncio.run(fuzz(address, count=count, seed=seed, concurrency=concurrency))


async def fuzz(address: Address, *, count: int, seed: int, concurrency: int) -> Verdict:
    """Send ``count`` requests, ``concurrency`` at a time, each over its own connection."""
    draw, verdict, began = random.Random(seed), Verdict(), time.monotonic()
    progress = [began]

    async def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            request = draw_request(draw)
            verdict.kinds[request.kind] += 1
            sent = time.monotonic()
            problem = await _send(address, request, verdict)
            verdict.slowest_seconds = max(verdict.slowest_seconds, time.monotonic() - sent)
            if problem is not None:
                verdict.problem_count += 1
                if len(verdict.problems) < MAX_EXAMPLES:
                    shown = b"".join(request.pieces)[:SHOWN_BYTES]
                    verdict.problems.append(f"request {number}, {request.kind}: {problem}: {shown!r}")
            if time.monotonic() - progress[0] > PROGRESS_SECONDS:
                progress[0] = time.monotonic()
                print(f"fuzz: {number} of {count}, {dict(verdict.statuses)}", file=sys.stderr, flush=True)

    numbers = iter(range(count))
    await asyncio.gather(*(work(numbers) for _ in range(concurrency)))
    verdict.seconds = time.monotonic() - began
    return verdict


async def _send(address: Address, request: FuzzRequest, verdict: Verdict) -> str | None:
    """Send a request. Returns what is wrong with its response, or None."""
    connection = await RawConnection.open(address)
    try:
        for number, piece in enumerate(request.pieces):
            if number:
                await asyncio.sleep(PAUSE_SECONDS)
            if connection.lost:
                break
            connection.send(piece)
        if not request.complete:
            connection.finish_sending()
        reply = await connection.reply()
    except TimeoutError:
        return "no response and no end"
    finally:
        connection.cut()
    verdict.statuses[reply.status] += 1
    return _judge(request, reply)


def _judge(request: FuzzRequest, reply: Reply) -> str | None:
    if reply.status == 0 or not reply.whole:
        return "no whole response" if request.complete else None
    if reply.status >= 500 and reply.status != UNAVAILABLE:
        return f"{reply.status} {reply.body[:SHOWN_BYTES]!r}"
    if reply.status >= 400:
        return _judge_error(request, reply)
    return None


def _judge_error(request: FuzzRequest, reply: Reply) -> str | None:
    """Check that an error has the shape of its path. HTTP that cannot be read has OpenAI's on every path."""
    try:
        body = json.loads(reply.body)
        error = body["error"]
        shape = "openai" if {"type", "param", "code"} < set(error) else "anthropic"
        known = shape == "openai" or (body["type"] == "error" and set(error) == {"type", "message"})
        valid = known and bool(error["message"]) and shape in _error_shapes(request)
    except (ValueError, KeyError, TypeError):
        valid = False
    return None if valid and len(reply.body) < 1 << 14 else f"{reply.status} {reply.body[:SHOWN_BYTES]!r}"


def _error_shapes(request: FuzzRequest) -> tuple[str, ...]:
    """Return the shapes that an error of this request may have."""
    words = request.pieces[0].split(b" ", 2)
    if len(words) < 3 or words[1].decode("latin-1") not in MESSAGES:
        return ("openai",)
    return ("anthropic",) if request.complete else ("anthropic", "openai")


class ItlClient:
    """The process of ``itl_client``."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def mark(self) -> dict[str, Any]:
        """Return the inter-token latencies since the last call: their count, and percentiles in milliseconds."""
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the client ended: its stream broke"
        latencies: dict[str, Any] = json.loads(line)
        return latencies


@contextmanager
def running_itl_client(url: str, tokens: int, pause_seconds: float) -> Iterator[ItlClient]:
    """Run the client that measures inter-token latency during a with-block, with a pause after each ``tokens`` tokens."""
    command = [sys.executable, str(Path(itl_client.__file__)), url, str(tokens), str(pause_seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield ItlClient(process)
        finally:
            process.kill()
