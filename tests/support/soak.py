"""Soak test: many short requests at a time, each answer compared with the same request's answer alone."""

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from answers import Answer, difference, read_answer
from raw_http import Address, RawConnection, Reply, post
from soak_requests import MESSAGES, Question, malformed, questions, too_long

CONCURRENCY: Final = 64
DISCONNECTS: Final = 0.10
TOO_LONG: Final = 0.05
MALFORMED: Final = 0.05
PROGRESS_SECONDS: Final = 10.0
SAMPLE_SECONDS: Final = 1.0
DISCONNECT_WITHIN_SECONDS: Final = 0.1
LONG_ANSWER: Final = 64
MAX_EXAMPLES: Final = 10


@dataclass
class Outcome:
    """Counts of a run. ``hung`` and ``wrong`` contain a line for each of the first few cases."""

    counts: Counter[str] = field(default_factory=Counter)
    hung: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def record(self, kind: str, problems: list[str], description: str) -> None:
        """Count one more of ``kind``, and describe it among the first problems."""
        self.counts[kind] += 1
        if len(problems) < MAX_EXAMPLES:
            problems.append(description)

    def summary(self) -> dict[str, Any]:
        """Return the outcome as a JSON object."""
        counts = {name: self.counts[name] for name in sorted(self.counts)}
        return {"seconds": round(self.seconds, 1), **counts, "hung": self.hung, "wrong": self.wrong}


class Soak:
    """One run of ``count`` requests against the demo model at ``address``, from a pool of ``pool`` questions."""

    def __init__(self, address: Address, *, count: int, pool: int, seed: int) -> None:
        self._address = address
        self._count = count
        self._draw = random.Random(seed)
        self._questions = questions(pool, seed)
        self._alone: list[Answer] = []
        self._numbers = iter(range(count))
        self._done = 0
        self.outcome = Outcome()

    async def prepare(self) -> None:
        """Request each question alone, twice: its answer must be reproducible to compare others with it."""
        line = await RawConnection.open(self._address)
        for question in self._questions:
            answers = []
            for stream in (False, True):
                line.send(post(question.path, question.make_body(stream=stream)))
                answers.append(read_answer(await line.reply()))
            differing = difference(*answers)
            assert differing is None and answers[0].finished, f"{question}: {differing or answers[0]}"
            self._alone.append(answers[0])
        line.cut()

    async def run(self, on_progress: Callable[[float], None]) -> Outcome:
        """Run all requests, ``CONCURRENCY`` at a time; call ``on_progress`` regularly with the share done."""
        began = time.monotonic()
        watcher = asyncio.ensure_future(self._watch(on_progress))
        try:
            await asyncio.gather(*(self._work() for _ in range(CONCURRENCY)))
        finally:
            watcher.cancel()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    async def _watch(self, on_progress: Callable[[float], None]) -> None:
        reported = began = time.monotonic()
        while True:
            await asyncio.to_thread(on_progress, self._done / self._count)
            if time.monotonic() - reported >= PROGRESS_SECONDS:
                reported = time.monotonic()
                rate = self._done / (reported - began)
                print(
                    f"soak: {self._done} of {self._count}, {rate:.0f}/s, {dict(self.outcome.counts)}",
                    file=sys.stderr,
                    flush=True,
                )
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _work(self) -> None:
        """Run one client, which keeps its connection as long as possible."""
        line = await RawConnection.open(self._address)
        for number in self._numbers:
            if line.lost:
                line = await RawConnection.open(self._address)
            try:
                await self._one(line)
            except TimeoutError:
                self.outcome.record("hung_requests", self.outcome.hung, f"request {number}")
                line.cut()
            self._done += 1
        line.cut()

    async def _one(self, line: RawConnection) -> None:
        """Draw one action, run it, and check its result."""
        draw = self._draw.random()
        if draw < DISCONNECTS:
            await self._disconnect(line)
        elif draw < DISCONNECTS + TOO_LONG:
            question = too_long(self._draw)
            stream = self._draw.random() < 0.5
            line.send(post(question.path, question.make_body(stream=stream)))
            code = (
                None if question.path == MESSAGES else "context_length_exceeded"
            )  # Anthropic's have no code
            self._check_refusal("too_long", await line.reply(), code=code)
        elif draw < DISCONNECTS + TOO_LONG + MALFORMED:
            path, body = malformed(self._draw)
            line.send(post(path, body))
            self._check_refusal("malformed", await line.reply(), code=None)
        else:
            number = self._draw.randrange(len(self._questions))
            question, stream = self._questions[number], self._draw.random() < 0.5
            line.send(post(question.path, question.make_body(stream=stream)))
            self._check_answer(question, self._alone[number], read_answer(await line.reply()))

    async def _disconnect(self, line: RawConnection) -> None:
        """Disconnect at a random moment: within the body, while waiting, or in the middle of the answer."""
        question = self._draw.choice(self._questions)
        body = question.make_long_body(LONG_ANSWER, stream=self._draw.random() < 0.7)
        request = post(question.path, body)
        moment = self._draw.randrange(3)
        line.send(request if moment else request[: self._draw.randrange(1, len(request))])
        if moment == 1:
            await line.begun()
        await asyncio.sleep(self._draw.random() * DISCONNECT_WITHIN_SECONDS)
        line.cut()
        self.outcome.counts["disconnected"] += 1

    def _check_answer(self, question: Question, alone: Answer, busy: Answer) -> None:
        differing = difference(alone, busy)
        if differing is None:
            self.outcome.counts["right"] += 1
        else:
            self.outcome.record("wrong_answers", self.outcome.wrong, f"{question}: {differing}")

    def _check_refusal(self, kind: str, reply: Reply, *, code: str | None) -> None:
        """Check that a refusal is a 400 with the error object of its API."""
        answer = read_answer(reply)
        if answer.status == 400 and answer.terminal and code in (None, answer.code):
            self.outcome.counts[kind] += 1
        else:
            self.outcome.record("wrong_refusals", self.outcome.wrong, f"{kind}: {answer}")
