"""Open-loop traffic driver: measures what clients of a Service see while its pods change.

It runs inside the cluster, needs the openai package with its httpx2, and imports nothing else of this repository, so that a
test or a user can copy the file into any pod:

    python3 traffic.py record URL MODEL > answers.json
    python3 traffic.py run URL MODEL --answers answers.json --rate 20 > edit.json
    python3 traffic.py table edit.json

`record` asks every question of a fixed list alone, greedily, and writes the right answers. `run` then sends requests at a fixed
rate until it has sent `--requests`, `--seconds` have passed, or a client stops it. Arrivals do not wait for answers (open
loop), and latencies count from the scheduled arrival, so a server that stalls cannot hide it. At most `--max-in-flight`
requests are under way; arrivals beyond that are reported as not sent. Endpoints, streamed and plain requests, new and kept-alive
connections alternate, and every answer is compared with the right one, by text and finish reason.

While it runs, an HTTP server on `--control-port` takes marks from outside:

    POST /windows/NAME    begin or continue a window; requests belong to the window of their arrival
    GET  /report          the report so far
    POST /stop            send nothing more, wait for what is in flight, return the report, and end
"""

import argparse
import asyncio
import contextlib
import functools
import heapq
import itertools
import json
import math
import random
import sys
import time
import urllib.parse
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx2

SEED: Final = 20
REQUEST_TIMEOUT_SECONDS: Final = 60.0
CONNECT_TIMEOUT_SECONDS: Final = 15.0
"""A lost packet makes a connection late, not impossible: DNS clients ask again after 5 s, TCP after 1, 3 and 7 s.

The latencies show such a delay. A connection that is refused fails at once, and one that nothing answers after this time.
"""
STOP_TIMEOUT_SECONDS: Final = REQUEST_TIMEOUT_SECONDS + 5
MAX_ERRORS: Final = 500
MAX_SLOWEST: Final = 5
MAX_HEAD_BYTES: Final = 8192
MAX_WINDOWS: Final = 100
MAX_KEPT_ALIVE: Final = 64
MAX_TOKENS: Final = 12
FIRST_WINDOW: Final = "before"
WINDOWS: Final = "POST /windows/"
REPORT: Final = "GET /report"
STOP: Final = "POST /stop"
QUANTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
SUBJECTS: Final = (
    "a pod", "a Deployment", "a Service", "a node", "etcd", "the kubelet", "Helm", "kubectl", "a namespace", "a Secret",
    "RBAC", "Skiff",
)  # fmt: skip
FORMS: Final = ("What is {}?", "Explain {} in one sentence.")


class Failure(StrEnum):
    """Kinds of failed requests, by the point at which they failed."""

    CONNECT = "no connection"
    """Refused, reset or not established in time: the server has read nothing."""
    BEFORE = "before the first byte"
    """The connection ended after the request was sent, and nothing of a response had arrived."""
    AFTER = "after the first byte"
    """The response was cut, or a stream ended with an error event or without its terminal event."""
    STATUS = "status"
    """A complete response with a status other than 200; reports name the number."""
    WRONG = "wrong answer"
    TIMEOUT = "timeout"


class Answer(NamedTuple):
    """The part of a response that must be right."""

    text: str
    finish: str


class RequestFailed(Exception):
    """A request failed. ``kind``: a `Failure`, with the number of an HTTP status."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class IncompleteStream(Exception):
    """A stream ended with an error event or without its terminal event."""


def questions(seed: int = SEED) -> list[str]:
    """Return the fixed list of questions, shuffled by the seed."""
    made = [form.format(subject) for subject in SUBJECTS for form in FORMS]
    random.Random(seed).shuffle(made)
    return made


# The endpoints: bodies, and the reading of plain and streamed responses.


def _chat_body(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": MAX_TOKENS}


def _completions_body(question: str) -> dict[str, Any]:
    return {"prompt": question, "temperature": 0, "max_tokens": MAX_TOKENS}


def _responses_body(question: str) -> dict[str, Any]:
    return {"input": question, "temperature": 0, "max_output_tokens": MAX_TOKENS, "store": False}


def _read_chat(body: Any) -> Answer:
    choice = body["choices"][0]
    return Answer(choice["message"]["content"] or "", choice["finish_reason"])


def _read_completion(body: Any) -> Answer:
    choice = body["choices"][0]
    return Answer(choice["text"], choice["finish_reason"])


def _read_response(body: Any) -> Answer:
    parts = [part["text"] for item in body["output"] for part in item.get("content", ())]
    return Answer("".join(parts), (body.get("incomplete_details") or {}).get("reason") or body["status"])


def _read_message(body: Any) -> Answer:
    return Answer("".join(block["text"] for block in body["content"]), body["stop_reason"])


def _read_choices(events: list[Any], text_of: Callable[[Any], str | None]) -> Answer:
    """Read a stream of chat or completions; `[DONE]` ends it."""
    if not events or events[-1] != "[DONE]":
        raise IncompleteStream("the stream ended without [DONE]")
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    finish = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    return Answer("".join(text_of(choice) or "" for choice in choices), finish[-1] if finish else "")


def _read_chat_stream(events: list[Any]) -> Answer:
    return _read_choices(events, lambda choice: choice["delta"].get("content"))


def _read_completion_stream(events: list[Any]) -> Answer:
    return _read_choices(events, lambda choice: choice["text"])


def _read_response_stream(events: list[Any]) -> Answer:
    if not events or events[-1]["type"] not in ("response.completed", "response.incomplete"):
        raise IncompleteStream(
            f"the stream ended with {events[-1]['type'] if events else 'nothing'}, not with its response"
        )
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    return Answer(text, _read_response(events[-1]["response"]).finish)


def _read_message_stream(events: list[Any]) -> Answer:
    if not events or events[-1]["type"] != "message_stop":
        raise IncompleteStream("the stream ended without message_stop")
    deltas = [event["delta"] for event in events if event["type"] in ("content_block_delta", "message_delta")]
    return Answer("".join(each.get("text", "") for each in deltas), deltas[-1]["stop_reason"])


class Endpoint(NamedTuple):
    """One endpoint of the API. ``method``: the dotted name of openai's method for it, empty if it has none."""

    path: str
    method: str
    body: Callable[[str], dict[str, Any]]
    read: Callable[[Any], Answer]
    read_stream: Callable[[list[Any]], Answer]


ENDPOINTS: Final = {
    "chat": Endpoint("/v1/chat/completions", "chat.completions", _chat_body, _read_chat, _read_chat_stream),
    "completions": Endpoint(
        "/v1/completions", "completions", _completions_body, _read_completion, _read_completion_stream
    ),
    "responses": Endpoint(
        "/v1/responses", "responses", _responses_body, _read_response, _read_response_stream
    ),
    "messages": Endpoint("/v1/messages", "", _chat_body, _read_message, _read_message_stream),
}


def parse_events(body: str) -> list[Any]:
    """Return the events of a whole stream. Raises `IncompleteStream` for an error event and for a cut one."""
    *blocks, rest = body.split("\n\n")
    if rest:
        raise IncompleteStream("the stream was cut inside an event")
    events: list[Any] = []
    for block in blocks:
        data = "\n".join(line[6:] for line in block.split("\n") if line.startswith("data: "))
        if not data:
            continue
        event = data if data == "[DONE]" else json.loads(data)
        if isinstance(event, dict) and (
            event.get("error") or event.get("type") in ("error", "response.failed")
        ):
            raise IncompleteStream(f"error event: {data}")
        events.append(event)
    return events


# Clients: one attempt without retries, or as the openai package's standard client sends it.


class Client:
    """Sends requests to one service. ``retries``: 0, or the number that the openai package may make by itself."""

    def __init__(self, url: str, model: str, *, retries: int = 0) -> None:
        self._model = model
        timeout = httpx2.Timeout(REQUEST_TIMEOUT_SECONDS, connect=CONNECT_TIMEOUT_SECONDS, pool=None)
        no_limit = httpx2.Limits(max_connections=None, max_keepalive_connections=MAX_KEPT_ALIVE)
        self._url = url.rstrip("/")
        self._clients = {
            kept: httpx2.AsyncClient(
                base_url=self._url,
                timeout=timeout,
                trust_env=False,
                limits=no_limit,
                headers={} if kept else {"Connection": "close"},
            )
            for kept in (False, True)
        }
        self._retrying = (
            {kept: self._wrap(client, retries) for kept, client in self._clients.items()} if retries else {}
        )

    def _wrap(self, client: httpx2.AsyncClient, retries: int) -> Any:
        # Imported here because it is needed for retries alone and takes a second of a busy machine.
        import openai

        return openai.AsyncOpenAI(
            base_url=f"{self._url}/v1",
            api_key="none",
            max_retries=retries,
            timeout=client.timeout,
            http_client=client,
        )

    async def ask(self, endpoint: Endpoint, question: str, *, stream: bool, kept: bool) -> Answer:
        """Return the answer to one question. Raises RequestFailed."""
        opened = False
        try:
            async with (
                asyncio.timeout(REQUEST_TIMEOUT_SECONDS),
                self._open(endpoint, question, stream=stream, kept=kept) as response,
            ):
                opened = True
                content = (await response.aread()).decode()
                if response.status_code != httpx2.codes.OK:
                    raise RequestFailed(f"{Failure.STATUS} {response.status_code}", content[:300])
                return (
                    endpoint.read_stream(parse_events(content))
                    if stream
                    else endpoint.read(json.loads(content))
                )
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise RequestFailed(Failure.CONNECT, _describe(error)) from error
        except (TimeoutError, httpx2.TimeoutException) as error:
            raise RequestFailed(Failure.TIMEOUT, _describe(error)) from error
        except httpx2.TransportError as error:
            raise RequestFailed(Failure.AFTER if opened else Failure.BEFORE, _describe(error)) from error
        except IncompleteStream as error:
            raise RequestFailed(Failure.AFTER, str(error)) from error
        except (LookupError, ValueError, TypeError) as error:
            raise RequestFailed(Failure.WRONG, f"a response of another shape: {_describe(error)}") from error

    @contextlib.asynccontextmanager
    async def _open(
        self, endpoint: Endpoint, question: str, *, stream: bool, kept: bool
    ) -> AsyncIterator[httpx2.Response]:
        """Send a request and yield its response once the head has arrived; with retries, that of the last attempt."""
        body = {"model": self._model, **endpoint.body(question), **({"stream": True} if stream else {})}
        if not (self._retrying and endpoint.method):
            async with self._clients[kept].stream("POST", endpoint.path, json=body) as response:
                yield response
            return
        import openai

        resource = functools.reduce(getattr, endpoint.method.split("."), self._retrying[kept])
        try:
            async with resource.with_streaming_response.create(**body) as wrapped:
                yield wrapped.http_response
        except openai.APIStatusError as error:
            raise RequestFailed(f"{Failure.STATUS} {error.status_code}", str(error)) from error
        except openai.APIConnectionError as error:
            if isinstance(error.__cause__, httpx2.TransportError):
                raise error.__cause__ from None
            raise RequestFailed(Failure.BEFORE, _describe(error)) from error


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


# What is sent, and the report.


class Kind(NamedTuple):
    """One kind of request of the mix."""

    endpoint: str
    stream: bool
    kept: bool

    def __str__(self) -> str:
        words = (self.endpoint, "streamed" if self.stream else "plain", "kept-alive" if self.kept else "new")
        return ", ".join(words)


def mix(*, retries: bool) -> list[Kind]:
    """Return every kind of request; with retries, only those of endpoints that the openai package has."""
    names = [name for name, endpoint in ENDPOINTS.items() if endpoint.method or not retries]
    return [Kind(*each) for each in itertools.product(names, (True, False), (True, False))]


@dataclass
class Window:
    """Requests that arrived within one window. A window that begins again is continued. ``resumed``: when it last began."""

    name: str
    resumed: float | None = None
    seconds: float = 0.0
    requests: int = 0
    not_sent: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    revisions: Counter[str] = field(default_factory=Counter)
    """Right answers, by the revision of the model that gives them; `a = b` where both do."""
    latencies: list[float] = field(default_factory=list)
    max_in_flight: int = 0

    def pause(self, now: float) -> None:
        """End the window for now."""
        if self.resumed is not None:
            self.seconds, self.resumed = self.seconds + now - self.resumed, None

    def report(self, now: float) -> dict[str, Any]:
        """Return this window's part of the report; latencies are those of right answers, in milliseconds."""
        seconds = self.seconds + (0 if self.resumed is None else now - self.resumed)
        return {
            "name": self.name,
            "seconds": round(seconds, 3),
            "requests": self.requests,
            "not_sent": self.not_sent,
            "failed": sum(self.failures.values()),
            "failures": dict(sorted(self.failures.items())),
            "revisions": dict(sorted(self.revisions.items())),
            "max_in_flight": self.max_in_flight,
            "latency_ms": percentiles(self.latencies),
        }


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return the percentiles of latencies in milliseconds (nearest rank); empty without any."""
    ordered = sorted(seconds)
    return {
        name: round(ordered[math.ceil(part * len(ordered)) - 1] * 1000, 1)
        for name, part in (QUANTILES.items() if ordered else ())
    }


def make_table(reports: dict[str, dict[str, Any]]) -> str:
    """Return a Markdown table with a row for each window of each report, and their sum."""
    lines = [
        "| run | window | requests | not sent | failed | p50 ms | p99 ms | longest ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, report in reports.items():
        for window in report["windows"]:
            failures = ", ".join(f"{count} {kind}" for kind, count in window["failures"].items())
            failed = f"{window['failed']} ({failures})" if failures else "0"
            latencies = [f"{window['latency_ms'].get(part, 0):,.0f}" for part in ("p50", "p99", "max")]
            cells = [
                name,
                window["name"],
                f"{window['requests']:,}",
                f"{window['not_sent']:,}",
                failed,
                *latencies,
            ]
            lines.append(f"| {' | '.join(cells)} |")
    sums = [
        f"{sum(each[part] for each in reports.values()):,}" for part in ("requests", "not_sent", "failed")
    ]
    return "\n".join([*lines, f"| all | | {' | '.join(sums)} | | | |"])


class Driver:
    """Sends requests at a fixed rate and keeps the account of them."""

    def __init__(self, client: Client, answers: dict[str, Any], options: argparse.Namespace) -> None:
        self._client = client
        self._answers = answers
        self._options = options
        self._draws = self._draw()
        self._started = time.monotonic()
        self._windows: dict[str, Window] = {}
        self.begin_window(FIRST_WINDOW)
        self._kinds: Counter[str] = Counter()
        self._errors: list[dict[str, Any]] = []
        self._slowest: list[tuple[float, float, str, str]] = []
        """A heap of the slowest right answers: seconds, time of arrival, window and kind."""
        self._in_flight: set[asyncio.Task[None]] = set()
        self._late_seconds = 0.0
        self._completed = 0
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()

    def _draw(self) -> Iterator[tuple[Kind, str]]:
        """Draw kinds and questions without end: whole rounds of the mix, each in another order."""
        draw = random.Random(SEED)
        asked, kinds = questions(), mix(retries=self._options.retries > 0)
        while True:
            draw.shuffle(kinds)
            for kind in kinds:
                yield kind, draw.choice(asked)

    def begin_window(self, name: str) -> None:
        """Begin or continue a window. Raises ValueError when there are too many."""
        if name not in self._windows and len(self._windows) >= MAX_WINDOWS:
            raise ValueError(f"there are {MAX_WINDOWS} windows already")
        now = time.monotonic()
        for window in self._windows.values():
            window.pause(now)
        self._window = self._windows.setdefault(name, Window(name))
        self._window.resumed = now

    async def run(self) -> None:
        """Send requests on schedule until the limits are reached or `stop` is called, and wait for their answers."""
        options = self._options
        for number in range(options.requests):
            due = self._started + number / options.rate
            now = time.monotonic()
            if now < due:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), due - now)
            elif number % 16 == 0:
                await asyncio.sleep(0)  # behind schedule: let answers be read between the arrivals
            if self._stopping.is_set() or due - self._started > options.seconds:
                break
            self._arrive(due)
        if self._in_flight:
            await asyncio.wait(self._in_flight, timeout=STOP_TIMEOUT_SECONDS)
        self._stopped.set()

    def _arrive(self, due: float) -> None:
        """Send one request, or count it as not sent if too many are in flight."""
        window = self._window
        self._late_seconds = max(self._late_seconds, time.monotonic() - due)
        kind, question = next(self._draws)
        if len(self._in_flight) >= self._options.max_in_flight:
            window.not_sent += 1
            return
        window.requests += 1
        self._kinds[str(kind)] += 1
        task = asyncio.create_task(self._send(window, kind, question, due))
        self._in_flight.add(task)
        task.add_done_callback(self._in_flight.discard)
        window.max_in_flight = max(window.max_in_flight, len(self._in_flight))

    async def _send(self, window: Window, kind: Kind, question: str, due: float) -> None:
        """Send one request and record how it ended."""
        try:
            answer = await self._client.ask(
                ENDPOINTS[kind.endpoint], question, stream=kind.stream, kept=kind.kept
            )
            right = {name: Answer(*each[kind.endpoint][question]) for name, each in self._answers.items()}
            matches = [name for name, each in right.items() if each == answer]
            if not matches:
                raise RequestFailed(Failure.WRONG, f"{answer} instead of one of {right}")
        except RequestFailed as error:
            window.failures[error.kind] += 1
            if len(self._errors) < MAX_ERRORS:
                self._errors.append(
                    {
                        "window": window.name,
                        "at_seconds": round(due - self._started, 3),
                        "after_seconds": round(time.monotonic() - due, 3),
                        "request": str(kind),
                        "failure": error.kind,
                        "detail": str(error)[:500],
                    }
                )
        else:
            window.revisions[" = ".join(matches)] += 1
            seconds = time.monotonic() - due
            window.latencies.append(seconds)
            heapq.heappush(self._slowest, (seconds, due, window.name, str(kind)))
            if len(self._slowest) > MAX_SLOWEST:
                heapq.heappop(self._slowest)
        self._completed += 1

    async def stop(self) -> dict[str, Any]:
        """Send nothing more, wait for what is in flight, and return the report."""
        self._stopping.set()
        await self._stopped.wait()
        return self.report()

    def report(self) -> dict[str, Any]:
        """Return the report so far."""
        now = time.monotonic()
        windows = [window.report(now) for window in self._windows.values()]
        options = self._options
        return {
            "rate": options.rate,
            "retries": options.retries,
            "max_in_flight": options.max_in_flight,
            "seconds": round(now - self._started, 3),
            **{name: sum(each[name] for each in windows) for name in ("requests", "not_sent", "failed")},
            "unanswered": sum(each["requests"] for each in windows) - self._completed,
            "latest_arrival_seconds": round(self._late_seconds, 3),
            "mix": dict(sorted(self._kinds.items())),
            "windows": windows,
            "errors": self._errors,
            "slowest": [
                {
                    "window": window,
                    "at_seconds": round(due - self._started, 3),
                    "after_seconds": round(seconds, 3),
                    "request": kind,
                }
                for seconds, due, window, kind in sorted(self._slowest, reverse=True)
            ],
        }


class Control:
    """The HTTP server that takes marks, one request a connection."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.ended = asyncio.Event()
        """Set once a client has stopped the driver and got the report."""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_SECONDS + 5):
                head = (await reader.readuntil(b"\r\n\r\n"))[:MAX_HEAD_BYTES].decode("latin-1")
                request = " ".join(head.split(" ", 2)[:2])
                status, body = await self._answer(request)
                content = json.dumps(body).encode()
                writer.write(
                    f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
                    f"Connection: close\r\n\r\n".encode()
                    + content
                )
                await writer.drain()
                if request == STOP:
                    self.ended.set()
        except (
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            ConnectionError,
            TimeoutError,
            ValueError,
        ):
            pass  # this client gets no answer; the traffic goes on
        finally:
            writer.close()

    async def _answer(self, request: str) -> tuple[str, dict[str, Any]]:
        if request.startswith(WINDOWS) and request != WINDOWS:
            window = urllib.parse.unquote(request.removeprefix(WINDOWS))
            self._driver.begin_window(window)
            return "200 OK", {"window": window}
        if request == REPORT:
            return "200 OK", self._driver.report()
        if request == STOP:
            return "200 OK", await self._driver.stop()
        return "404 Not Found", {"error": f"the requests are {WINDOWS}NAME, {REPORT} and {STOP}"}


async def record(url: str, model: str) -> dict[str, dict[str, Answer]]:
    """Ask every question of every endpoint alone, plain, and return the right answers."""
    client = Client(url, model)
    return {
        name: {
            question: await client.ask(endpoint, question, stream=False, kept=True)
            for question in questions()
        }
        for name, endpoint in ENDPOINTS.items()
    }


async def run(options: argparse.Namespace, answers: dict[str, Any]) -> dict[str, Any]:
    """Run the traffic and return its report."""
    driver = Driver(Client(options.url, options.model, retries=options.retries), answers, options)
    control = Control(driver)
    if not options.control_port:
        await driver.run()
        return driver.report()
    server = await asyncio.start_server(control.handle, "127.0.0.1", options.control_port)
    async with server:
        await driver.run()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(control.ended.wait(), options.seconds)
    return driver.report()


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    top = argparse.ArgumentParser(
        prog="traffic.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record", help="ask every question alone and print the right answers")
    runner = commands.add_parser("run", help="send requests and print the report")
    for each in (recorder, runner):
        each.add_argument("url", help="base URL of the service, without /v1")
        each.add_argument("model", help="the model's name in requests")
    runner.add_argument(
        "--answers",
        required=True,
        action="append",
        help="file that `record` wrote, named after the model's revision; once for each revision that may answer",
    )
    runner.add_argument("--rate", type=float, default=10, help="arrivals in a second")
    runner.add_argument("--requests", type=int, default=1_000_000, help="most requests to send")
    runner.add_argument("--seconds", type=float, default=3600, help="longest time to send")
    runner.add_argument(
        "--max-in-flight", type=int, default=512, help="arrivals beyond are not sent, but reported"
    )
    runner.add_argument(
        "--retries", type=int, default=0, help="send through openai's client with this max_retries"
    )
    tables = commands.add_parser("table", help="print reports as a Markdown table")
    tables.add_argument(
        "reports", nargs="+", help="file that `run` wrote, named after what happened meanwhile"
    )
    runner.add_argument(
        "--control-port", type=int, default=0, help="port on 127.0.0.1 that takes marks; 0: none"
    )
    return top


def main() -> None:
    """Run the command line."""
    options = parser().parse_args()
    if options.command == "record":
        print(json.dumps(asyncio.run(record(options.url, options.model))))
    elif options.command == "run":
        answers = {Path(name).stem: json.loads(Path(name).read_text()) for name in options.answers}
        json.dump(asyncio.run(run(options, answers)), sys.stdout, indent=1)
    else:
        print(make_table({Path(name).stem: json.loads(Path(name).read_text()) for name in options.reports}))


if __name__ == "__main__":
    main()
