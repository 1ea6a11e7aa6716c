"""The same requests alone and in a crowd: what differs, and proof that it was a crowd."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from answers import Answer, difference, read_answer
from random_requests import RandomRequests
from service import Service, running_service
from watch import nothing_held
from wire import Address, Line, address_of, post

CONCURRENCY: Final = 32
SEED: Final = 20260
ALONE_FLAGS: Final = (
    "--cache",
    "naive",
    "--disable-overlap",
    "--kv-cache-tokens",
    "4096",
    "--max-batch-tokens",
    "512",
)
"""One request at a time in big chunks, nothing shared, nothing overlapped."""
BUSY_FLAGS: Final = (
    "--cache",
    "radix",
    "--kv-cache-tokens",
    "512",
    "--page-size",
    "8",
    "--max-batch-tokens",
    "48",
    "--max-running-requests",
    "24",
)
"""Far less than what two dozen requests come to hold, and a prompt takes several chunks."""
_COUNTERS: Final = {
    "retractions": "skiff_retractions_total",
    "evicted_pages": "skiff_evicted_pages_total",
    "prefix_hit_tokens": "skiff_prefix_hit_tokens_total",
    "mixed_steps": 'skiff_step_duration_seconds_count{kind="mixed"}',
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many were compared, what differed, and what the busy server's counters say."""

    count: int
    differences: list[str]
    counters: dict[str, int]


def compare(model: Path, count: int, *, tp: int = 1, seed: int = SEED) -> Comparison:
    """Answer ``count`` random requests twice and compare."""
    source = RandomRequests(seed)
    bodies = [source.body() for _ in range(count)]
    shared = ("--log-level", "debug", "--tp", str(tp))
    with running_service(model, *shared, *ALONE_FLAGS) as service:
        alone = asyncio.run(_answers(address_of(service.url), bodies, concurrency=1))
    with running_service(model, *shared, *BUSY_FLAGS) as service:
        order = list(range(count))
        random.Random(seed + 1).shuffle(order)
        crowd = asyncio.run(
            _answers(address_of(service.url), [bodies[each] for each in order], concurrency=CONCURRENCY)
        )
        nothing_held(service)
        counters = {name: int(service.metric(line)) for name, line in _COUNTERS.items()}
        _still_consistent(service)
    busy = dict(zip(order, crowd, strict=True))
    found = [(number, difference(each, busy[number])) for number, each in enumerate(alone)]
    return Comparison(
        count, [f"{bodies[number]}: {told}" for number, told in found if told is not None], counters
    )


async def _answers(address: Address, bodies: Sequence[dict[str, Any]], *, concurrency: int) -> list[Answer]:
    """Answers in the order of ``bodies``, so many at a time."""
    answers: list[Answer] = [Answer(0)] * len(bodies)
    numbers = iter(range(len(bodies)))

    async def work() -> None:
        line = await Line.open(address)
        for number in numbers:
            line.send(post("/generate", bodies[number]))
            answers[number] = read_answer(await line.reply())
        line.cut()

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return answers


def _still_consistent(service: Service) -> None:
    """With log level debug an idle scheduler checks each page, and ends the service if one is lost."""
    assert service.http.get(service.url + "/health_generate", timeout=60).status_code == 200
    assert service.process.poll() is None
