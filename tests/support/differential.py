"""The same requests alone and in a crowd: what differs, and proof that it was a crowd."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from answers import Answer, difference, read_answer
from near_ties import find_parting, find_ties
from random_requests import RandomRequests
from raw_http import Address, RawConnection, address_of, post
from service import Service, running_service
from watch import nothing_held

CONCURRENCY: Final = 32
SEED: Final = 20260
ALONE_FLAGS: Final = (
    "--disable-radix-cache",
    "--disable-overlap-schedule",
    "--max-total-tokens",
    "4096",
    "--max-num-batched-tokens",
    "512",
)
"""One request at a time in big chunks, nothing shared, nothing overlapped."""
BUSY_FLAGS: Final = (
    "--max-total-tokens",
    "512",
    "--page-size",
    "8",
    "--max-num-batched-tokens",
    "48",
    "--max-running-requests",
    "24",
)
"""Far less than what two dozen requests come to hold, and a prompt takes several chunks."""
_COUNTERS: Final = {
    "preemptions": "skiff_preemptions_total",
    "evicted_pages": "skiff_evicted_pages_total",
    "prefix_hit_tokens": "skiff_prefix_cache_hits_total",
    "mixed_steps": 'skiff_step_duration_seconds_count{kind="mixed"}',
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """How many were compared, what differed, how many parted at ties, and what the busy server's counters say."""

    count: int
    differences: list[str]
    ties: int
    counters: dict[str, int]


def compare(model: Path, count: int, *, tp: int = 1, seed: int = SEED) -> Comparison:
    """Answer ``count`` random requests twice and compare."""
    source = RandomRequests(seed)
    bodies = [source.body() for _ in range(count)]
    flags = ("--log-level", "debug", "--tp", str(tp))

    def alone(model: Path, numbers: Sequence[int]) -> list[Answer]:
        with running_service(model, *flags, *ALONE_FLAGS) as service:
            asked = [bodies[number] for number in numbers]
            return asyncio.run(_answers(address_of(service.url), asked, concurrency=1))

    single = alone(model, range(count))
    busy, counters = _in_a_crowd(model, bodies, flags, seed + 1)
    told = {number: difference(each, busy[number]) for number, each in enumerate(single)}
    found = {number: what for number, what in told.items() if what is not None}
    partings = [find_parting(number, single[number], busy[number]) for number in found]
    ties = find_ties(model, [each for each in partings if each is not None], alone)
    differences = [f"{bodies[number]}: {what}" for number, what in found.items() if number not in ties]
    return Comparison(count, differences, len(ties), counters)


def _in_a_crowd(
    model: Path, bodies: Sequence[dict[str, Any]], flags: Sequence[str], seed: int
) -> tuple[list[Answer], dict[str, int]]:
    """The answers to ``bodies``, many at a time in a shuffled order, and the server's counters."""
    order = list(range(len(bodies)))
    random.Random(seed).shuffle(order)
    with running_service(model, *flags, *BUSY_FLAGS) as service:
        asked = [bodies[number] for number in order]
        crowd = asyncio.run(_answers(address_of(service.url), asked, concurrency=CONCURRENCY))
        nothing_held(service)
        counters = {name: int(service.metric(line)) for name, line in _COUNTERS.items()}
        _still_consistent(service)
    found = dict(zip(order, crowd, strict=True))
    return [found[number] for number in range(len(bodies))], counters


async def _answers(address: Address, bodies: Sequence[dict[str, Any]], *, concurrency: int) -> list[Answer]:
    """Answers in the order of ``bodies``, so many at a time."""
    answers: list[Answer] = [Answer(0)] * len(bodies)
    numbers = iter(range(len(bodies)))

    async def work() -> None:
        line = await RawConnection.open(address)
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
