"""Differential test of one service: the same requests alone, and many at a time under memory pressure."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from answers import Answer, difference, read_answer
from near_ties import find_divergence, find_ties
from random_requests import RandomRequests
from raw_http import Address, RawConnection, address_of, post
from service import Service, running_service
from watch import check_nothing_held

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
"""One request at a time in big prefill chunks, without prefix cache and overlap."""
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
"""A KV cache far smaller than 24 requests need, and several chunks for each prompt."""
_COUNTERS: Final = {
    "preemptions": "skiff_preemptions_total",
    "evicted_pages": "skiff_evicted_pages_total",
    "prefix_hit_tokens": "skiff_prefix_cache_hits_total",
    "mixed_steps": 'skiff_step_duration_seconds_count{kind="mixed"}',
}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The number of requests, the differences, the number of near ties, and the busy service's counters."""

    count: int
    differences: list[str]
    ties: int
    counters: dict[str, int]


def compare(model: Path, count: int, *, tp: int = 1, seed: int = SEED) -> Comparison:
    """Answer ``count`` random requests alone and beside others, and compare the answers."""
    source = RandomRequests(seed)
    bodies = [source.body() for _ in range(count)]
    flags = ("--log-level", "debug", "--tp", str(tp))

    def alone(model: Path, numbers: Sequence[int]) -> list[Answer]:
        with running_service(model, *flags, *ALONE_FLAGS) as service:
            chosen = [bodies[number] for number in numbers]
            return asyncio.run(_request_all(address_of(service.url), chosen, concurrency=1))

    single = alone(model, range(count))
    busy, counters = _answer_busy(model, bodies, flags, seed + 1)
    compared = {number: difference(each, busy[number]) for number, each in enumerate(single)}
    found = {number: what for number, what in compared.items() if what is not None}
    divergences = [find_divergence(number, single[number], busy[number]) for number in found]
    ties = find_ties(model, [each for each in divergences if each is not None], alone)
    differences = [f"{bodies[number]}: {what}" for number, what in found.items() if number not in ties]
    return Comparison(count, differences, len(ties), counters)


def _answer_busy(
    model: Path, bodies: Sequence[dict[str, Any]], flags: Sequence[str], seed: int
) -> tuple[list[Answer], dict[str, int]]:
    """Answer ``bodies`` many at a time in a shuffled order; return the answers, and the service's counters."""
    order = list(range(len(bodies)))
    random.Random(seed).shuffle(order)
    with running_service(model, *flags, *BUSY_FLAGS) as service:
        shuffled = [bodies[number] for number in order]
        answers = asyncio.run(_request_all(address_of(service.url), shuffled, concurrency=CONCURRENCY))
        check_nothing_held(service)
        counters = {name: int(service.metric(line)) for name, line in _COUNTERS.items()}
        _check_consistent(service)
    found = dict(zip(order, answers, strict=True))
    return [found[number] for number in range(len(bodies))], counters


async def _request_all(
    address: Address, bodies: Sequence[dict[str, Any]], *, concurrency: int
) -> list[Answer]:
    """Send all requests, ``concurrency`` at a time; return the answers in the order of ``bodies``."""
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


def _check_consistent(service: Service) -> None:
    """Check that the service runs: with log level debug an idle scheduler checks each page, and fails if one is lost."""
    assert service.http.get(service.url + "/health_generate", timeout=60).status_code == 200
    assert service.process.poll() is None
