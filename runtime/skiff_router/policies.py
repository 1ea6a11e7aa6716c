"""Routing policies: which of the available pods gets a request.

Ties and near ties are broken at random. Routers have the same reports, and do not see each other's latest requests: by any
rule that they share, each would send its next request to the same pod.
"""

from collections.abc import Sequence
from random import Random
from typing import Final, Protocol

from skiff_router.endpoints import Endpoint
from skiff_router.pod_state import Prompt

PREFIX: Final = "prefix"
LEAST_LOAD: Final = "least-load"
ROUND_ROBIN: Final = "round-robin"
NAMES: Final = (PREFIX, LEAST_LOAD, ROUND_ROBIN)
FALLBACK_TOKEN_SECONDS: Final = 1e-4
"""Seconds per prompt token, assumed until a pod has measured it."""
NEAR_SECONDS: Final = 0.002
"""Differences of expected seconds that are noise where no pod has anything of the prompt."""
NEAR_CACHED_SECONDS: Final = 0.0002
"""Differences of expected seconds that are noise where some pod has a part of the prompt."""
UNREPORTED_CACHED_TOKENS: Final = 256
"""Tokens that are cached behind the longest known prefix, on average: a part of a block, and the answer to that prompt."""
NEAR_LOAD: Final = 0.05
"""Differences in the number of requests, as a fraction of the mean, that are noise."""
MAX_CANDIDATES: Final = 64
"""Maximum number of pods compared for one request; larger clusters are sampled."""


class Policy(Protocol):
    """Chooses pods. ``reads_blocks``: it wants a prompt's blocks."""

    reads_blocks: bool

    def choose(self, endpoints: Sequence[Endpoint], prompt: Prompt, now: float) -> Endpoint:
        """Return one of ``endpoints``, which are available, in the order of their names, and at least one."""


class RoundRobin:
    """Each pod in turn."""

    reads_blocks = False

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, endpoints: Sequence[Endpoint], prompt: Prompt, now: float) -> Endpoint:
        """Return the next pod."""
        self._turn = (self._turn + 1) % len(endpoints)
        return endpoints[self._turn]


class LeastLoad:
    """The pod with the fewest requests in flight: from all routers where it reports them, else from this one."""

    reads_blocks = False

    def __init__(self, seed: int | None = None) -> None:
        """``seed``: of the choice among equals; None for another one in each process."""
        self._random = Random(seed).random

    def choose(self, endpoints: Sequence[Endpoint], prompt: Prompt, now: float) -> Endpoint:
        """Return one of the least loaded pods."""
        loads = [endpoint.requests for endpoint in endpoints]
        limit = min(loads) + NEAR_LOAD * sum(loads) / len(loads)
        near = [endpoint for endpoint, load in zip(endpoints, loads, strict=True) if load <= limit]
        return near[int(self._random() * len(near))]


class PrefixAware:
    """The pod that is expected to send the first token soonest.

    Expected seconds = the wait for what is queued there + the prefill of what is not cached there, both by the pod's own
    step times. So a prefix draws its requests to one pod until its queue costs more than the prefill elsewhere; then
    another pod computes it once, and has it, too. A new pod is empty, so it gets what is new.

    Pods with the longest known prefix probably hold more than its blocks, so ``UNREPORTED_CACHED_TOKENS`` count as
    cached there.
    """

    reads_blocks = True

    def __init__(self, seed: int | None = None) -> None:
        """``seed``: of the choice among equals; None for another one in each process."""
        self._random = Random(seed).random

    def choose(self, endpoints: Sequence[Endpoint], prompt: Prompt, now: float) -> Endpoint:
        """Return the pod with the least expected seconds."""
        blocks, tokens = prompt.blocks, prompt.tokens
        if len(endpoints) > MAX_CANDIDATES:
            endpoints = self._select_candidates(endpoints, blocks)
        first = blocks[0] if blocks else None
        mean_rate = 0.0
        expected: list[float] = []
        longest = 0
        holders: list[tuple[int, float]] = []  # of the longest prefix: index, and seconds of a token
        for endpoint in endpoints:
            pod = endpoint.pod
            rate = pod.token_seconds
            if not rate:
                mean_rate = mean_rate or _mean_token_seconds(endpoints)
                expected.append(_guess_seconds(endpoint, prompt, mean_rate))
                continue
            left = tokens
            if first in pod.prompt_blocks:
                cached = pod.count_cached_blocks(blocks)
                left = prompt.count_uncached_tokens(cached)
                if cached >= longest:
                    if cached > longest:
                        longest, holders = cached, []
                    holders.append((len(expected), rate))
            busy = pod.free_at - now
            expected.append((busy if busy > 0 else 0) + pod.first_token_seconds + left * rate)
        limit = NEAR_SECONDS
        if holders:
            limit = NEAR_CACHED_SECONDS
            behind = min(UNREPORTED_CACHED_TOKENS, prompt.count_uncached_tokens(longest))
            for index, rate in holders:
                expected[index] -= behind * rate
        limit += min(expected)
        near = [endpoint for endpoint, seconds in zip(endpoints, expected, strict=True) if seconds <= limit]
        return near[int(self._random() * len(near))]

    def _select_candidates(self, endpoints: Sequence[Endpoint], blocks: Sequence[int]) -> list[Endpoint]:
        """Return a sample of the pods: half from those that hold most of the prompt, half from all, so that an idle one is likely."""
        half = MAX_CANDIDATES // 2
        holders: Sequence[Endpoint] = endpoints
        low, high = 0, len(blocks)
        while low < high:  # the longest prefix that any of them holds
            middle = (low + high + 1) // 2
            block = blocks[middle - 1]
            deeper = [endpoint for endpoint in holders if block in endpoint.pod.prompt_blocks]
            if deeper:
                holders, low = deeper, middle
            else:
                high = middle - 1
        others = self._sample(endpoints, half)
        return others if not low else list(dict.fromkeys([*self._sample(holders, half), *others]))

    def _sample(self, endpoints: Sequence[Endpoint], count: int) -> list[Endpoint]:
        """Return at most ``count`` of the pods, evenly spaced from a random one on."""
        if len(endpoints) <= count:
            return list(endpoints)
        start, step = self._random() * len(endpoints), len(endpoints) / count
        return [endpoints[int(start + index * step) % len(endpoints)] for index in range(count)]


def _mean_token_seconds(endpoints: Sequence[Endpoint]) -> float:
    """Return the mean seconds of a prompt token of the pods that have measured them."""
    measured = [each.pod.token_seconds for each in endpoints if each.pod.token_seconds]
    return sum(measured) / len(measured) if measured else FALLBACK_TOKEN_SECONDS


def _guess_seconds(endpoint: Endpoint, prompt: Prompt, rate: float) -> float:
    """Return the expected seconds at a pod that has not measured its steps, at ``rate`` seconds a token."""
    pod = endpoint.pod
    cached = pod.count_cached_blocks(prompt.blocks)
    if pod.load is None:
        queued: float = endpoint.in_flight * prompt.tokens
    else:
        queued = pod.reported_tokens + pod.unacknowledged_tokens
    return (queued + prompt.count_uncached_tokens(cached)) * rate


def make_policy(name: str) -> Policy:
    """Return the policy called ``name``, one of ``NAMES``."""
    policies: dict[str, type[PrefixAware | LeastLoad | RoundRobin]] = {
        PREFIX: PrefixAware,
        LEAST_LOAD: LeastLoad,
        ROUND_ROBIN: RoundRobin,
    }
    return policies[name]()
