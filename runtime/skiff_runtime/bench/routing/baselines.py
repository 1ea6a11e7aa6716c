"""Other routers' policies, and an oracle, behind the interface of the router's own."""

import hashlib
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from skiff_router.endpoints import Endpoint
from skiff_router.pod_state import Prompt
from skiff_runtime.bench.routing.sessions import SimulatedRequest
from skiff_runtime.bench.routing.simulated_pod import SimulatedPod

REPLICAS_ON_RING: Final = 256
LOAD_FACTOR: Final = 1.25
"""KubeAI's defaults of consistent hashing with bounded loads."""
QUEUE_WEIGHT: Final = 2.0
KV_WEIGHT: Final = 2.0
PREFIX_WEIGHT: Final = 3.0
"""The endpoint picker's default weights."""
PICKER_BLOCKS: Final = 7812
"""Of 256 tokens: its default of 31,250 blocks of 64 tokens for each pod."""


@dataclass(frozen=True, slots=True)
class SimulatedPrompt(Prompt):
    """A prompt with the request, at which only baselines may look."""

    request: SimulatedRequest | None = None


class RandomChoice:
    """Any pod."""

    reads_blocks = False

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, endpoints: Sequence[Endpoint], prompt: Prompt, now: float) -> Endpoint:
        """Return any pod."""
        return endpoints[self._random.randrange(len(endpoints))]


class BoundedConsistentHash:
    """Consistent hashing with bounded loads (Mirrokni et al., 2016) by the first 100 characters, as KubeAI has it."""

    reads_blocks = False

    def __init__(self, names: Sequence[str]) -> None:
        self._ring = sorted(
            (int.from_bytes(hashlib.sha256(f"{name}{index}".encode()).digest()[:8]), name)
            for name in names
            for index in range(REPLICAS_ON_RING)
        )
        self._points = [point for point, _ in self._ring]

    def choose(self, endpoints: Sequence[Endpoint], prompt: Prompt, now: float) -> Endpoint:
        """Return the first pod on the ring from the prompt's point on whose load is within the bound."""
        assert isinstance(prompt, SimulatedPrompt) and prompt.request is not None
        by_name = {endpoint.name: endpoint for endpoint in endpoints}
        point = int.from_bytes(hashlib.sha256(str(prompt.request.key).encode()).digest()[:8])
        start = bisect_left(self._points, point)
        total = sum(endpoint.in_flight for endpoint in endpoints)
        bound = LOAD_FACTOR * (total + 1) / len(endpoints)
        for offset in range(len(self._ring)):
            endpoint = by_name[self._ring[(start + offset) % len(self._ring)][1]]
            if endpoint.in_flight + 1 <= bound:
                return endpoint
        return endpoints[0]


class EndpointPicker:
    """Gateway API's endpoint picker: weighted scores of queue, KV cache use, and a table of the prefixes it sent."""

    reads_blocks = True

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._sent: dict[str, OrderedDict[int, None]] = {}

    def choose(self, endpoints: Sequence[Endpoint], prompt: Prompt, now: float) -> Endpoint:
        """Return the pod with the highest score."""
        queues = [0 if each.pod.load is None else each.pod.load.waiting for each in endpoints]
        low, high = min(queues), max(queues)
        scores = []
        for endpoint, queue in zip(endpoints, queues, strict=True):
            usage = 0.0 if endpoint.pod.load is None else endpoint.pod.load.kv_cache_usage
            score = QUEUE_WEIGHT * ((high - queue) / (high - low) if high > low else 1.0)
            score += KV_WEIGHT * (1.0 - usage)
            if prompt.blocks:
                score += PREFIX_WEIGHT * self._count_sent(endpoint.name, prompt.blocks) / len(prompt.blocks)
            scores.append(score)
        best = max(scores)
        tied = [endpoint for endpoint, score in zip(endpoints, scores, strict=True) if score >= best - 1e-9]
        chosen = tied[self._random.randrange(len(tied))]
        self._remember(chosen.name, prompt.blocks)
        return chosen

    def _count_sent(self, name: str, blocks: Sequence[int]) -> int:
        sent = self._sent.get(name)
        if sent is None:
            return 0
        count = 0
        for block in blocks:
            if block not in sent:
                break
            count += 1
        return count

    def _remember(self, name: str, blocks: Sequence[int]) -> None:
        sent = self._sent.setdefault(name, OrderedDict())
        for block in blocks:
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > PICKER_BLOCKS:
            sent.popitem(last=False)


class Oracle:
    """Exact and immediate knowledge of every pod's cache, queue and step times: the soonest first token."""

    reads_blocks = False

    def __init__(self, pods: Mapping[str, SimulatedPod], seed: int) -> None:
        self._pods = pods
        self._random = Random(seed)

    def choose(self, endpoints: Sequence[Endpoint], prompt: Prompt, now: float) -> Endpoint:
        """Return the pod with the least seconds to the first token."""
        assert isinstance(prompt, SimulatedPrompt) and prompt.request is not None
        expected = [self._pods[each.name].predict_first_token(prompt.request, now) for each in endpoints]
        limit = min(expected) + 1e-4
        near = [each for each, seconds in zip(endpoints, expected, strict=True) if seconds <= limit]
        return near[self._random.randrange(len(near))]
