"""The HTTP fuzzer: thousands of random connections, each checked against its plan, beside a well-behaved client.

A connection is drawn from the seed and its number, so ``SKIFF_TEST_HTTP_FUZZ_FIRST`` and a count of 1 repeat one alone.
"""

import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import uvloop
from h11_responses import Malformed, ReplyStream, StrictReply
from http_fuzz_plan import Closing, Ending, Expected, Plan, Planner, Step
from http_fuzz_requests import SMUGGLED_ID
from raw_http import Address

HANG_SECONDS: Final = 30.0
PROGRESS_SECONDS: Final = 20.0
MAX_EXAMPLES: Final = 10
MAX_PIECES: Final = 60
SHOWN_BYTES: Final = 400
LEAVE_SECONDS: Final = 0.02
GENERATED_ID: Final = re.compile("[0-9a-f]{24}")


@dataclass
class Verdict:
    """Results: counts, and the first violations."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    violation_count: int = 0
    connections: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return the counts."""
        return {
            "connections": self.connections,
            "replies": self.statuses.total(),
            "seconds": round(self.seconds, 1),
            "statuses": {str(status): self.statuses[status] for status in sorted(self.statuses)},
            "kinds": dict(self.kinds.most_common(30)),
            "violations": self.violation_count,
        }

    def record(self, violation: str) -> None:
        """Count a violation, and keep the first few."""
        self.violation_count += 1
        if len(self.violations) < MAX_EXAMPLES:
            self.violations.append(violation)
            print(f"http fuzz: {violation}", file=sys.stderr, flush=True)


class ServerGone(Exception):
    """The server no longer accepts connections."""


class Exchange(asyncio.Protocol):
    """One connection: sends a plan's steps, and divides what arrives into responses."""

    def __init__(self, plan: Plan) -> None:
        self.stream = ReplyStream(tuple(each.method for each in plan.expected))
        self.error = ""
        self.extra_bytes = b""
        self.reset = False
        self._received = 0
        self._changed = asyncio.Event()
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        self._feed(data)
        self._changed.set()

    def eof_received(self) -> bool:
        self._feed(b"")
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.reset = error is not None
        self._changed.set()
        if not self.ended.done():
            self.ended.set_result(None)

    def _feed(self, data: bytes) -> None:
        if not self.error:
            try:
                self.stream.feed(data)
            except Malformed as error:
                self.error = str(error)
                self.extra_bytes = self.stream.pending + data
                self.transport.abort()
        else:
            self.extra_bytes += data

    @property
    def ids(self) -> list[str]:
        """IDs of all responses, including those behind the last expected one."""
        extra_bytes = re.findall(rb"x-request-id: (\S+)\r\n", self.extra_bytes)
        return [each.headers.get("x-request-id", "") for each in self.stream.replies] + [
            each.decode() for each in extra_bytes
        ]

    @property
    def closes(self) -> bool:
        """Return whether the connection has ended, or a response announced its end."""
        announced = any(each.headers.get("connection") == "close" for each in self.stream.replies)
        return announced or self.ended.done() or bool(self.error)

    async def ready_for(self, step: Step) -> bool:
        """Wait until a step may be sent. Returns False if nothing more is to be sent."""
        while not (self.ended.done() if step.stubborn else self.closes):
            replies = len(self.stream.replies)
            if step.interim_of is not None and replies <= step.interim_of:
                waits = not (replies == step.interim_of and self.stream.interim)
            else:
                waits = step.replies is not None and replies < step.replies
            if not waits:
                return step.interim_of is None or replies <= step.interim_of
            self._changed.clear()
            await self._changed.wait()
        return False


async def _send(exchange: Exchange, plan: Plan, draw: random.Random) -> None:
    """Send the plan's bytes in pieces with small pauses, up to the point where the client leaves."""
    left = round(sum(len(step.data) for step in plan.steps) * plan.sent_share)
    for step in plan.steps:
        if left <= 0 or not await exchange.ready_for(step):
            break
        data = step.data[:left]
        left -= len(data)
        mean = max(plan.piece_bytes, len(data) // MAX_PIECES) if plan.piece_bytes else len(data)
        while data and not exchange.ended.done():
            size = draw.randrange(1, 2 * mean) if plan.piece_bytes else len(data)
            exchange.transport.write(data[:size])
            data = data[size:]
            if data:
                await asyncio.sleep(draw.choice((0, 0, 0, 0.001)))
    if plan.ending is Ending.ABORT:
        await asyncio.sleep(draw.random() * LEAVE_SECONDS)
        exchange.transport.abort()
    elif plan.ending is Ending.HALF and not exchange.ended.done():
        exchange.transport.write_eof()


async def converse(address: Address, plan: Plan, draw: random.Random, verdict: Verdict) -> str | None:
    """Execute a plan. Returns the violation, or None."""
    loop = asyncio.get_running_loop()
    try:
        _, exchange = await loop.create_connection(lambda: Exchange(plan), *address)
    except OSError as error:
        raise ServerGone(f"no connection: {error}") from None
    try:
        async with asyncio.timeout(HANG_SECONDS):
            await _send(exchange, plan, draw)
            await exchange.ended
    except TimeoutError:
        return f"hung: {len(exchange.stream.replies)} of {len(plan.expected)} replies, {exchange.error}"
    finally:
        exchange.transport.abort()
        verdict.statuses.update(each.status for each in exchange.stream.replies)
    return judge(plan, exchange)


def judge(plan: Plan, exchange: Exchange) -> str | None:
    """Compare the responses with a plan: one per request, in order, and the connection closed as expected."""
    replies, client_ends = exchange.stream.replies, plan.ending is not Ending.SERVER
    if SMUGGLED_ID in exchange.ids:
        return f"a part of a body was served as a request: {exchange.ids}"
    for number, (reply, expected) in enumerate(zip(replies, plan.expected, strict=False)):
        violation = judge_reply(reply, expected)
        if violation is not None:
            return f"reply {number}: {violation}: {reply}"[: 3 * SHOWN_BYTES]
        if reply.headers.get("connection") == "close":
            return (
                None
                if number == len(replies) - 1 and not exchange.error
                else f"responses behind the last: {replies[-1]}"
            )
    if client_ends:
        return exchange.error if "without a request" in exchange.error else None
    if exchange.error or exchange.reset:
        return f"after {len(replies)} replies: {exchange.error or 'reset'}"
    return f"{len(replies)} replies to {len(plan.expected)} requests, and an end without notice"


def judge_reply(reply: StrictReply, expected: Expected) -> str | None:
    """Return the violation of one response, or None."""
    headers = reply.headers
    if reply.status not in expected.statuses:
        return f"status not in {expected.statuses}"
    given = headers.get("x-request-id", "")
    if not given or (
        given != expected.request_id if expected.request_id else not GENERATED_ID.fullmatch(given)
    ):
        return f"not the id {expected.request_id!r}"
    closes = headers.get("connection") == "close"
    if closes and expected.closing is Closing.NEVER:
        return "closes without a reason"
    if not closes and expected.closing is Closing.REQUIRED:
        return "does not announce the close"
    framings = {"content-length", "transfer-encoding"} & set(headers)
    if expected.old and "transfer-encoding" in headers:
        return "chunks for an HTTP/1.0 client"
    if len(framings) != 1 and not expected.old:
        return f"framed by {sorted(framings)}"
    return judge_body(reply, expected)


def judge_body(reply: StrictReply, expected: Expected) -> str | None:
    """Return the violation of a body, or None: an error without its object, or a text that is not the echoed one."""
    if expected.method == "HEAD":
        return "a body" if reply.body else None
    try:
        if reply.status >= 400:
            error = json.loads(reply.body)["error"]
            return (
                None if error["message"] and error["type"] == "invalid_request_error" else "no error object"
            )
        if expected.text is None:
            return None
        if not expected.stream:
            text = json.loads(reply.body)["choices"][0]["text"]
        else:
            events = reply.body.decode().removesuffix("\n\n").split("\n\n")
            if events.pop() != "data: [DONE]":
                return "no end of the stream"
            choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
            text = "".join(choice["text"] for choice in choices)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return f"a body that cannot be read ({error!r})"
    return None if text.startswith(expected.text) else f"not the text {expected.text!r}"


def strike(address: Address, model: str, first: int, count: int, seed: int, concurrency: int) -> Verdict:
    """Run ``count`` connections from the calling process."""
    return uvloop.run(fuzz(address, model, first=first, count=count, seed=seed, concurrency=concurrency))


async def fuzz(
    address: Address, model: str, *, first: int, count: int, seed: int, concurrency: int
) -> Verdict:
    """Run the connections, ``concurrency`` at a time."""
    verdict, began = Verdict(), time.monotonic()
    progress = [began]

    async def work(numbers: Iterator[int]) -> None:
        for number in numbers:
            draw = random.Random(f"{seed}/{number}")
            plan = Planner(draw, number, model).plan()
            violation = await converse(address, plan, draw, verdict)
            verdict.connections += 1
            verdict.kinds.update(plan.kinds)
            if violation is not None:
                verdict.record(
                    f"seed {seed}, connection {number}, {plan.kinds}, {plan.ending.name}: {violation}"
                )
            if time.monotonic() - progress[0] > PROGRESS_SECONDS:
                progress[0] = time.monotonic()
                rate = verdict.connections / (progress[0] - began)
                print(
                    f"http fuzz: {verdict.connections} of {count}, {rate:.0f}/s, {verdict.violation_count} violations",
                    file=sys.stderr,
                    flush=True,
                )

    numbers = iter(range(first, first + count))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(work(numbers))
    except* ServerGone as gone:
        verdict.record(str(gone.exceptions[0]))
    verdict.seconds = time.monotonic() - began
    return verdict
