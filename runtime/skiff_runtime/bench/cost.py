"""CPU time of a service's processes by request and by token, from the difference of two loads."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from skiff_runtime.bench.cpu_time import Process, cpu_seconds
from skiff_runtime.bench.flag_types import Span
from skiff_runtime.bench.online.load_generator import Limits
from skiff_runtime.bench.online.runner import Plan, measure
from skiff_runtime.bench.workload import random_texts, random_tokens
from skiff_runtime.errors import SkiffError

IDLE_SECONDS: Final = 3.0
WARM_UP_REQUESTS: Final = 64
VOCABULARY: Final = 1000
REQUEST_SECONDS: Final = 600.0
LOAD_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The loads' common part: ``count`` requests, ``concurrency`` at a time."""

    url: str
    model: str
    endpoint: str
    count: int
    concurrency: int
    inputs: Span


@dataclass(frozen=True, slots=True)
class Cost:
    """What one process spends. ``busy_ratio``: share of one core while the loads lasted."""

    us_per_request: float
    us_per_token: float
    busy_ratio: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one load cost. ``cpu`` by process, in seconds, idle use taken off."""

    seconds: float
    requests: int
    tokens: int
    cpu: Mapping[str, float]


class Meter:
    """Watches the processes of one service under traffic."""

    def __init__(self, processes: list[Process], traffic: Traffic) -> None:
        """Warms the service up and measures it idle. SkiffError when requests fail."""
        self._processes = processes
        self._traffic = traffic
        self._load(output_tokens=4, seed=1, count=WARM_UP_REQUESTS)
        before = cpu_seconds(processes)
        time.sleep(IDLE_SECONDS)
        after = cpu_seconds(processes)
        self._idle = {name: (after[name] - before[name]) / IDLE_SECONDS for name in before}

    def sample(self, *, output_tokens: int, seed: int) -> Sampled:
        """The cost of one load whose answers all have ``output_tokens``."""
        before = cpu_seconds(self._processes)
        seconds, tokens = self._load(output_tokens=output_tokens, seed=seed, count=self._traffic.count)
        after = cpu_seconds(self._processes)
        cpu = {name: after[name] - before[name] - self._idle[name] * seconds for name in before}
        return Sampled(seconds, self._traffic.count, tokens, cpu)

    def _load(self, *, output_tokens: int, seed: int, count: int) -> tuple[float, int]:
        """Send ``count`` requests; the seconds that it took and the output tokens."""
        traffic, outputs = self._traffic, Span(output_tokens, output_tokens)
        generator = np.random.default_rng(seed)
        if traffic.endpoint == "chat":
            samples = random_texts(count, traffic.inputs, outputs, generator)
        else:
            samples = random_tokens(count, traffic.inputs, outputs, VOCABULARY, generator)
        plan = Plan(
            url=traffic.url,
            model=traffic.model,
            endpoint=traffic.endpoint,
            samples=samples,
            arrivals=[0.0] * count,
            temperature=0.0,
            seed=seed,
            ignore_eos=True,
            limits=Limits(traffic.concurrency, REQUEST_SECONDS, LOAD_SECONDS),
        )
        load, seconds = measure(plan, title=f"{count} requests of {output_tokens} tokens")
        for each in load.exchanges:
            if each.failure:
                raise SkiffError(f"a request failed ({each.failure}): {each.detail}")
        if load.unsent:
            raise SkiffError(f"{load.unsent} requests could not be sent within {LOAD_SECONDS:g} s")
        return seconds, sum(each.output_tokens for each in load.exchanges)


def costs(short: Sampled, long: Sampled) -> dict[str, Cost]:
    """By process. What the longer answers cost more, by token, is a token's; the rest is a request's."""
    found = {}
    more_tokens = long.tokens / long.requests - short.tokens / short.requests
    for name in short.cpu:
        of_short, of_long = short.cpu[name] / short.requests, long.cpu[name] / long.requests
        per_token = (of_long - of_short) / more_tokens
        per_request = of_short - per_token * short.tokens / short.requests
        busy = (short.cpu[name] + long.cpu[name]) / (short.seconds + long.seconds)
        found[name] = Cost(1e6 * per_request, 1e6 * per_token, busy)
    return found
