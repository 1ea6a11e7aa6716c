"""Many short requests at a time, each answer compared with the same request's alone; what it leaves is counted."""

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
from soak_requests import Question, malformed, questions, too_long

CONCURRENCY: Final = 64
DISCONNECTS: Final = 0.10
TOO_LONG: Final = 0.05
MALFORMED: Final = 0.05
PROGRESS_SECONDS: Final = 10.0
SAMPLE_SECONDS: Final = 1.0
LEAVE_WITHIN_SECONDS: Final = 0.1
LONG_ANSWER: Final = 64
MAX_EXAMPLES: Final = 10


@dataclass
class Outcome:
    """What was seen. ``hung`` and ``wrong`` hold a line for each of the first few cases."""

    counts: Counter[str] = field(default_factory=Counter)
    hung: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def note(self, kind: str, problems: list[str], told: str) -> None:
        """One more of ``kind``."""
        self.counts[kind] += 1
        if len(problems) < MAX_EXAMPLES:
            problems.append(told)

    def summary(self) -> dict[str, Any]:
        """For people and programs."""
        told = {name: self.counts[name] for name in sorted(self.counts)}
        return {"seconds": round(self.seconds, 1), **told, "hung": self.hung, "wrong": self.wrong}


class Soak:
    """One run of ``count`` requests against the demo model at ``address``, with ``pool`` questions that have an answer."""

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
        """Ask each question alone, twice: what differs between the two is no measure of anything."""
        line = await RawConnection.open(self._address)
        for question in self._questions:
            answers = []
            for stream in (False, True):
                line.send(post(question.path, question.asked(stream=stream)))
                answers.append(read_answer(await line.reply()))
            told = difference(*answers)
            assert told is None and answers[0].finished, f"{question}: {told or answers[0]}"
            self._alone.append(answers[0])
        line.cut()

    async def run(self, on_progress: Callable[[float], None]) -> Outcome:
        """Keep ``CONCURRENCY`` requests going until all were sent; ``on_progress`` is told the share done, now and then."""
        began = time.monotonic()
        watcher = asyncio.ensure_future(self._watch(on_progress))
        try:
            await asyncio.gather(*(self._work() for _ in range(CONCURRENCY)))
        finally:
            watcher.cancel()
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    async def _watch(self, on_progress: Callable[[float], None]) -> None:
        told = began = time.monotonic()
        while True:
            await asyncio.to_thread(on_progress, self._done / self._count)
            if time.monotonic() - told >= PROGRESS_SECONDS:
                told = time.monotonic()
                rate = self._done / (told - began)
                print(
                    f"soak: {self._done} of {self._count}, {rate:.0f}/s, {dict(self.outcome.counts)}",
                    file=sys.stderr,
                    flush=True,
                )
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _work(self) -> None:
        """One client: a connection is kept while it lasts."""
        line = await RawConnection.open(self._address)
        for number in self._numbers:
            if line.lost:
                line = await RawConnection.open(self._address)
            try:
                await self._one(line)
            except TimeoutError:
                self.outcome.note("hung_requests", self.outcome.hung, f"request {number}")
                line.cut()
            self._done += 1
        line.cut()

    async def _one(self, line: RawConnection) -> None:
        """Draw what to do, do it, judge it."""
        draw = self._draw.random()
        if draw < DISCONNECTS:
            await self._leave(line)
        elif draw < DISCONNECTS + TOO_LONG:
            question = too_long(self._draw)
            stream = self._draw.random() < 0.5
            line.send(post(question.path, question.asked(stream=stream)))
            self._judge_refusal("too_long", await line.reply(), code="context_length_exceeded")
        elif draw < DISCONNECTS + TOO_LONG + MALFORMED:
            path, body = malformed(self._draw)
            line.send(post(path, body))
            self._judge_refusal("malformed", await line.reply(), code=None)
        else:
            number = self._draw.randrange(len(self._questions))
            question, stream = self._questions[number], self._draw.random() < 0.5
            line.send(post(question.path, question.asked(stream=stream)))
            self._judge(question, self._alone[number], read_answer(await line.reply()))

    async def _leave(self, line: RawConnection) -> None:
        """Go away at a random moment: within the body, while it waits, or in the middle of the answer."""
        question = self._draw.choice(self._questions)
        body = question.asked(stream=self._draw.random() < 0.7)
        if "response_format" not in body and "guided_choice" not in body:
            body = {**body, "max_tokens": LONG_ANSWER, "ignore_eos": True}
        request = post(question.path, body)
        wish = self._draw.randrange(3)
        line.send(request if wish else request[: self._draw.randrange(1, len(request))])
        if wish == 1:
            await line.begun()
        await asyncio.sleep(self._draw.random() * LEAVE_WITHIN_SECONDS)
        line.cut()
        self.outcome.counts["disconnected"] += 1

    def _judge(self, question: Question, alone: Answer, busy: Answer) -> None:
        told = difference(alone, busy)
        if told is None:
            self.outcome.counts["right"] += 1
        else:
            self.outcome.note("wrong_answers", self.outcome.wrong, f"{question}: {told}")

    def _judge_refusal(self, kind: str, reply: Reply, *, code: str | None) -> None:
        """A refusal is a 400 in OpenAI's shape."""
        answer = read_answer(reply)
        if answer.status == 400 and answer.terminal and code in (None, answer.code):
            self.outcome.counts[kind] += 1
        else:
            self.outcome.note("wrong_refusals", self.outcome.wrong, f"{kind}: {answer}")
