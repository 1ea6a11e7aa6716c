"""The simulated cluster: sessions, routers and pods as discrete events, with one clock and one seed.

Routers are the router's own policies over its own endpoints, which follow pods by the events of ``GET /events``, as old
as they are in reality.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, Final

import numpy as np

from skiff_router.endpoints import Endpoint
from skiff_router.policies import LeastLoad, Policy, PrefixAware, RoundRobin
from skiff_router.upstream import Address
from skiff_runtime.bench.routing.baselines import (
    BoundedConsistentHash,
    EndpointPicker,
    Oracle,
    RandomChoice,
    SimulatedPrompt,
)
from skiff_runtime.bench.routing.sessions import BYTES_PER_TOKEN, WORKLOADS, Session, SimulatedRequest
from skiff_runtime.bench.routing.simulated_pod import PAGE_SIZE, SimulatedPod
from skiff_runtime.state_events import (
    MIN_INTERVAL_SECONDS,
    URGENT_INTERVAL_SECONDS,
    URGENT_TOKENS,
    LoadChanged,
    Snapshot,
    StateEvent,
)

NETWORK_SECONDS: Final = 0.001
WARM_UP_FRACTION: Final = 0.5
"""Of the time, at the beginning, whose arrivals are not counted. Caches are empty at first, and conversations that begin in their
middle send all that went before once; the last of them pause for 20 s before it."""
POLICIES: Final = (
    "prefix",
    "random",
    "round-robin",
    "least-request",
    "consistent-hash",
    "endpoint-picker",
    "oracle",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The simulated cluster and its load. ``rate``: requests a second of one pod; ``seconds``: time in which sessions begin."""

    pods: int
    routers: int
    workload: str
    rate: float
    seconds: float
    seed: int
    kv_tokens: int = 800_000
    max_running: int = 256
    max_step_tokens: int = 8192


@dataclass(slots=True)
class Outcome:
    """The figures of one simulation: of the requests that arrive between the warm-up and the end, ``seconds`` later.

    ``output_tokens``: of those that also ended by then. ``requests`` and ``hit_rate``: over all, with the warm-up.
    """

    ttft_seconds: list[float] = field(default_factory=list)
    requests: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    hit_rate: float = 0.0
    imbalance: float = 0.0
    """Requests that the busiest pod served, divided by the mean."""


@dataclass(eq=False, slots=True)
class _Router:
    """One router: its policy and its view of the pods."""

    policy: Policy
    endpoints: list[Endpoint]


class Cluster:
    """One simulation. ``run`` returns its figures."""

    def __init__(self, spec: ClusterSpec, policy: str) -> None:
        self._spec = spec
        self._now = 0.0
        self._serial = 0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._random = np.random.default_rng(spec.seed)
        self._workload = WORKLOADS[spec.workload].make(self._random)
        self._pods = [
            SimulatedPod(
                kv_tokens=spec.kv_tokens, max_running=spec.max_running, max_step_tokens=spec.max_step_tokens
            )
            for _ in range(spec.pods)
        ]
        names = [f"pod-{index:04}" for index in range(spec.pods)]
        by_name = dict(zip(names, self._pods, strict=True))
        self._routers = [
            _Router(
                make_policy(policy, names, by_name, seed=spec.seed * 1000 + number),
                [Endpoint(name, Address(name, 1)) for name in names],
            )
            for number in range(spec.routers)
        ]
        self._wake_ups = [float("inf")] * spec.pods
        self._reported_at = [-1.0] * spec.pods
        self._report_due = [float("inf")] * spec.pods
        self._received: list[dict[_Router, list[int]]] = [{} for _ in range(spec.pods)]
        self._outcome = Outcome()
        self._where: dict[SimulatedRequest, tuple[int, Endpoint]] = {}
        self._sent = 0
        self._served = [0] * spec.pods

    def run(self) -> Outcome:
        """Run until all sessions have ended."""
        self._begin_streams()
        self._schedule_sessions()
        while self._events:
            self._now, _, action, arguments = heappop(self._events)
            action(*arguments)
        return self._summarize()

    def _at(self, moment: float, action: Callable[..., None], *arguments: Any) -> None:
        self._serial += 1
        heappush(self._events, (moment, self._serial, action, arguments))

    def _begin_streams(self) -> None:
        for index, pod in enumerate(self._pods):
            for router in self._routers:
                router.endpoints[index].pod.apply(
                    Snapshot(
                        instance="1",
                        model="model",
                        state="ready",
                        block_size=PAGE_SIZE,
                        kv_tokens=self._spec.kv_tokens,
                        isolates_keys=False,
                        load=pod.read_load(),
                        prompt_blocks=[],
                        acknowledges=True,
                    ),
                    0.0,
                )

    def _schedule_sessions(self) -> None:
        """Schedule the beginnings of sessions: a Poisson process, and those that run already at time 0."""
        spec, workload, random = self._spec, self._workload, self._random
        rate = spec.rate * spec.pods / workload.requests_per_session
        count, spread = int(rate * workload.session_seconds), min(spec.seconds, 5.0)
        begins = [(float(random.uniform(0.0, spread)), True) for _ in range(count)]
        moment = 0.0
        while (moment := moment + float(random.exponential(1 / rate))) < spec.seconds:
            begins.append((moment, False))
        for number, (begin, running) in enumerate(begins):
            # Each session has its own numbers, so that it is the same by every policy.
            own = np.random.default_rng((spec.seed, number))
            self._at(begin, self._continue, workload.make_session(own, running=running))

    def _continue(self, session: Session) -> None:
        """Send the session's next request after its pause, unless it has ended or the time is over."""
        turn = next(session.turns, None)
        if turn is None or self._now + turn[0] > self._spec.seconds:
            return
        self._at(self._now + turn[0], self._arrive, turn[1])

    def _arrive(self, request: SimulatedRequest) -> None:
        router = self._routers[self._sent % len(self._routers)]
        self._sent += 1
        request.arrived_at = self._now
        prompt = SimulatedPrompt(
            blocks=request.block_names if router.policy.reads_blocks else (),
            text_bytes=len(request.prompt) * BYTES_PER_TOKEN,
            bytes_per_token=float(BYTES_PER_TOKEN),
            request=request,
        )
        endpoint = router.policy.choose(router.endpoints, prompt, self._now)
        endpoint.pod.record_prompt(self._now, prompt, self._sent)
        endpoint.in_flight += 1
        index = router.endpoints.index(endpoint)
        self._where[request] = index, endpoint
        self._at(self._now + NETWORK_SECONDS, self._submit, index, request, router, self._sent)

    def _submit(self, index: int, request: SimulatedRequest, router: _Router, number: int) -> None:
        pod = self._pods[index]
        self._received[index].setdefault(router, []).append(number)
        is_urgent = pod.count_uncached(request) >= URGENT_TOKENS
        pod.submit(request, self._now)
        self._changed(index, is_urgent=is_urgent)

    def _end_step(self, index: int, moment: float) -> None:
        if self._wake_ups[index] != moment:
            return  # the step ends at another time by now
        self._wake_ups[index] = float("inf")
        for request in self._pods[index].end_step(self._now):
            self._record(request)
            self._continue(request.session)
        self._changed(index)

    def _record(self, request: SimulatedRequest) -> None:
        index, endpoint = self._where.pop(request)
        endpoint.in_flight -= 1
        outcome = self._outcome
        outcome.requests += 1
        if request.arrived_at < WARM_UP_FRACTION * self._spec.seconds:
            return
        outcome.ttft_seconds.append(request.first_token_at - request.arrived_at)
        self._served[index] += 1
        if self._now <= self._spec.seconds:
            outcome.output_tokens += len(request.output)

    def _changed(self, index: int, *, is_urgent: bool = False) -> None:
        """Schedule the end of a pod's step, and the next report about it."""
        moment = self._pods[index].step_ends_at
        if moment is not None and moment != self._wake_ups[index]:
            self._wake_ups[index] = moment
            self._at(moment, self._end_step, index, moment)
        interval = URGENT_INTERVAL_SECONDS if is_urgent else MIN_INTERVAL_SECONDS
        due = max(self._now, self._reported_at[index] + interval)
        if due < self._report_due[index]:
            self._report_due[index] = due
            self._at(due, self._report, index, due)

    def _report(self, index: int, due: float) -> None:
        if self._report_due[index] != due:
            return  # an urgent report came before
        self._report_due[index] = float("inf")
        self._reported_at[index] = self._now
        pod = self._pods[index]
        load, prompts = pod.read_load(), pod.take_prompt_events()
        received, self._received[index] = self._received[index], {}
        for router in self._routers:
            events: list[StateEvent] = [LoadChanged("ready", load, received=received.get(router, []))]
            if prompts is not None:
                events.append(prompts)
            self._at(self._now + NETWORK_SECONDS, self._apply, router.endpoints[index], events)

    def _apply(self, endpoint: Endpoint, events: list[StateEvent]) -> None:
        for event in events:
            endpoint.pod.apply(event, self._now)

    def _summarize(self) -> Outcome:
        outcome = self._outcome
        prompt_tokens = sum(pod.prompt_tokens for pod in self._pods)
        outcome.hit_rate = sum(pod.cached_tokens for pod in self._pods) / max(1, prompt_tokens)
        outcome.seconds = (1 - WARM_UP_FRACTION) * self._spec.seconds
        outcome.imbalance = max(self._served) * len(self._served) / max(1, sum(self._served))
        return outcome


def make_policy(name: str, names: Sequence[str], pods: dict[str, SimulatedPod], *, seed: int) -> Policy:
    """Return the policy called ``name``, one of ``POLICIES``, for one router."""
    makers: dict[str, Callable[[], Policy]] = {
        "prefix": lambda: PrefixAware(seed),
        "random": lambda: RandomChoice(seed),
        "round-robin": RoundRobin,
        "least-request": lambda: LeastLoad(seed),
        "consistent-hash": lambda: BoundedConsistentHash(names),
        "endpoint-picker": lambda: EndpointPicker(seed),
        "oracle": lambda: Oracle(pods, seed),
    }
    return makers[name]()
