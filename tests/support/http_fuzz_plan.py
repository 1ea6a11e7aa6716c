"""Plans of connections for the HTTP fuzzer: the bytes that a client sends, and the responses that it must get.

A plan is drawn as a structure from which both bytes and expectations are made. So the oracle parses no request, and shares
no code with the server.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from http_fuzz_requests import SMUGGLED, SMUGGLED_ID, Request, bait, chunks, draw_request
from malformed_http import BROKEN_CHUNKS, BROKEN_HEADS, GARBAGE

MAX_REQUESTS: Final = 5
FLOOD_REQUESTS: Final = 100
PIPELINED_REQUESTS: Final = 64
"""Number of requests that may always wait behind the one being served."""


class Closing(Enum):
    """Effect of a response on the connection: whether it closes it."""

    NEVER = auto()
    ALLOWED = auto()
    REQUIRED = auto()


class Ending(Enum):
    """The end of a connection."""

    SERVER = auto()
    """The server closes it behind the last response."""
    HALF = auto()
    """The client closes its sending half, at the end or earlier."""
    ABORT = auto()
    """The client aborts the connection, at the end or earlier."""


@dataclass
class Expected:
    """Expected response to one request. ``text``: the text that a completion must echo. ``old``: the client uses HTTP/1.0."""

    request_id: str
    method: str
    statuses: tuple[int, ...]
    closing: Closing = Closing.NEVER
    text: str | None = None
    stream: bool = False
    old: bool = False


@dataclass
class Step:
    """Bytes to send. ``interim_of``: the request whose 100 Continue, or final response, the client awaits before them."""

    data: bytes
    interim_of: int | None = None
    replies: int | None = None
    """Number of responses that the client awaits before it sends these bytes."""
    stubborn: bool = False
    """The bytes are sent even after a response that closes the connection."""


@dataclass
class Plan:
    """One connection."""

    kinds: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    expected: list[Expected] = field(default_factory=list)
    ending: Ending = Ending.SERVER
    sent_share: float = 1.0
    """Share of all bytes that is sent if the client ends the connection."""
    piece_bytes: int = 0
    """Mean number of bytes written at a time; 0 for all at once."""


class Planner:
    """Draws the plan of one connection."""

    def __init__(self, draw: random.Random, number: int, model: str) -> None:
        self._draw = draw
        self._number = number
        self._model = model
        self._plan = Plan()

    def plan(self) -> Plan:
        """Return a plan of some well-formed requests, then an end of some kind."""
        draw, plan = self._draw, self._plan
        if draw.random() < 0.002:
            self._flood()
            return plan
        plan.piece_bytes = draw.choice((0, 0, 0, 1500, 200, 40))
        lockstep = draw.random() < 0.2
        for _ in range(draw.choice((0, 1, 1, 1, 2, 2, 3, MAX_REQUESTS))):
            if not self._closed():
                self._add(draw_request(self._draw, self._id(), self._model), lockstep=lockstep)
        self._end()
        return plan

    def _closed(self) -> bool:
        return bool(self._plan.expected) and self._plan.expected[-1].closing is Closing.REQUIRED

    def _id(self) -> str:
        return f"fuzz-{self._number}-{len(self._plan.expected)}"

    def _end(self) -> None:
        """Draw the end: malformed bytes, a client that leaves, or a last request with ``Connection: close``."""
        draw, plan = self._draw, self._plan
        kind = draw.random()
        if kind < 0.10:
            plan.ending = draw.choice((Ending.ABORT, Ending.HALF))
            plan.sent_share = draw.choice((1.0, draw.random()))
            self._unless_closed(lambda: self._add(draw_request(self._draw, self._id(), self._model)))
            plan.kinds.append(plan.ending.name.lower())
        elif kind < 0.16:
            self._unless_closed(self._short_body)
        elif kind < 0.32:
            self._unless_closed(self._broken_head)
        elif kind < 0.40:
            self._unless_closed(self._broken_chunks)
        elif kind < 0.46:
            self._surplus()
        elif kind < 0.50:
            self._unless_closed(self._late_body)
        else:
            self._unless_closed(self._last)

    def _unless_closed(self, add: Callable[[], None]) -> None:
        if not self._closed():
            add()

    def _last(self) -> None:
        last = Request("last", "GET", "/livez", 200, lines=["Connection: close"])
        self._add(last, closing=Closing.REQUIRED)

    # Framing.

    def _add(self, request: Request, *, closing: Closing | None = None, lockstep: bool = False) -> None:
        """Add a request with random framing, and with upgrade offers and expectations that must change nothing."""
        draw, lines = self._draw, list(request.lines)
        body = b"" if request.body is None else request.body
        old = closing is None and draw.random() < 0.06
        chunked = request.body is not None and not old and draw.random() < 0.35
        if closing is None:
            closing = Closing.ALLOWED if request.early and body else Closing.NEVER
            close = draw.random() < 0.04
            if close:
                lines.append("connection: close")
            elif old and draw.random() < 0.5:
                lines.append("connection: keep-alive")
            elif draw.random() < 0.10:
                lines += [
                    "Connection: Upgrade, HTTP2-Settings",
                    f"Upgrade: {draw.choice(('h2c', 'websocket'))}",
                ]
            closing = Closing.REQUIRED if close or old else closing
        waits = bool(body) and not old and draw.random() < 0.08
        if waits or (old and draw.random() < 0.1):
            lines.append("Expect: 100-continue")
        if waits and request.early:
            closing = Closing.REQUIRED
        trailers = []
        if chunked:
            lines.append("Transfer-Encoding: chunked")
            trailers = draw.choice(
                ([], [], [f"x-request-id: {SMUGGLED_ID}"], ["X-Request-Timeout-Seconds: none"])
            )
            body = chunks(draw, body, trailers)
        elif request.body is not None or draw.random() < 0.1:
            lines.append(f"Content-Length: {len(body)}")
        self._expect(request, closing, old=old)
        self._send(self._head(request, lines, old=old), lockstep=lockstep)
        if waits:
            self._plan.steps.append(Step(body, interim_of=len(self._plan.expected) - 1))
        else:
            self._plan.steps[-1].data += body

    def _head(self, request: Request, lines: list[str], *, old: bool = False) -> bytes:
        draw = self._draw
        target = f"http://localhost{request.path}" if draw.random() < 0.03 else request.path
        all_lines = ["host: localhost", f"x-request-id: {self._plan.expected[-1].request_id}", *lines]
        draw.shuffle(all_lines)
        start = "\r\n" if draw.random() < 0.03 else ""
        version = "1.0" if old else "1.1"
        text = f"{start}{request.method} {target} HTTP/{version}\r\n" + "\r\n".join(all_lines) + "\r\n\r\n"
        return text.encode()

    def _expect(self, request: Request, closing: Closing, *, old: bool = False) -> None:
        self._plan.kinds.append(request.kind)
        self._plan.expected.append(
            Expected(
                self._id(), request.method, (request.status,), closing, request.text, request.stream, old
            )
        )

    def _send(self, data: bytes, *, lockstep: bool = False) -> None:
        """Append bytes; with ``lockstep`` the client sends them after all earlier responses, else it pipelines."""
        steps = self._plan.steps
        if lockstep:
            steps.append(Step(data, replies=len(self._plan.expected) - 1))
        elif steps:
            steps[-1].data += data
        else:
            steps.append(Step(data))

    # Ends.

    def _short_body(self) -> None:
        """Add a body that is shorter than its length, which gets no response but an early one."""
        request = draw_request(self._draw, self._id(), self._model)
        body = request.body or b"x"
        announced = f"Content-Length: {len(body) + self._draw.choice((1, 10, 10_000))}"
        request.early = request.early or request.body is None
        self._expect(request, Closing.REQUIRED)
        self._plan.expected[-1].statuses = (request.status,) if request.early else ()
        self._send(self._head(request, [*request.lines, announced]) + body)
        self._plan.ending = Ending.HALF
        self._plan.kinds.append("short body")

    def _late_body(self) -> None:
        """Add a body that follows its response, and whose tail would be a request if the server lost count of its bytes."""
        draw, plan = self._draw, self._plan
        request = Request("late body", "POST", draw.choice(("/nowhere", "/v1/models")), 0)
        self._expect(request, Closing.REQUIRED)
        plan.expected[-1].statuses = (404, 405)
        body = bait(draw)
        self._send(self._head(request, [f"Content-Length: {len(body)}"]))
        plan.steps.append(Step(body, replies=len(plan.expected), stubborn=True))

    def _broken_head(self) -> None:
        """Add a head that must be rejected, and a request behind it that must not be served."""
        status, first_line, rest = self._draw.choice(BROKEN_HEADS)
        self._plan.kinds.append(f"broken head {first_line} {rest[:40]!r}")
        self._plan.expected.append(Expected("", first_line.split(" ")[0], (status,), Closing.REQUIRED))
        data = f"{first_line}\r\nhost: localhost\r\n{rest}".encode("latin-1")
        self._send(data + SMUGGLED)

    def _broken_chunks(self) -> None:
        """Add a body whose chunks must be rejected, unless the response precedes them."""
        request = draw_request(self._draw, self._id(), self._model)
        request.early = request.early or request.body is None
        self._expect(request, Closing.REQUIRED)
        self._plan.expected[-1].statuses = (400, request.status) if request.early else (400,)
        start = b"3\r\n0\r\n\r\n" * self._draw.choice((0, 1, 20))
        self._plan.kinds.append("broken chunks")
        data = self._head(request, [*request.lines, "Transfer-Encoding: chunked"])
        self._send(data + start + self._draw.choice(BROKEN_CHUNKS) + SMUGGLED)

    def _surplus(self) -> None:
        """Add bytes behind the last request that are no request: rejected, or ignored if the connection ends."""
        if not self._closed():
            self._plan.expected.append(Expected("", "GET", (400,), Closing.REQUIRED))
        self._plan.kinds.append("surplus")
        self._send(self._draw.choice(GARBAGE) + b"\r\n\r\n")

    def _flood(self) -> None:
        """Add more pipelined requests than may wait."""
        self._plan.kinds.append("flood")
        for _ in range(FLOOD_REQUESTS):
            request = Request("flood", "GET", "/livez", 200)
            waiting = len(self._plan.expected)
            self._expect(request, Closing.ALLOWED if waiting >= PIPELINED_REQUESTS else Closing.NEVER)
            self._plan.kinds.pop()
            self._send(self._head(request, []))
        self._last()
