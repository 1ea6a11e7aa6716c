"""A simulated service for the autoscaling planner: requests arrive at a rate, pods start late and serve at a rate each."""

from collections.abc import Callable
from dataclasses import dataclass, field

from skiff_operator.autoscaling import Decision, Memory, Observation, PodLoad, decide
from skiff_operator.spec import Autoscaling

PROMPT_TOKENS = 500


@dataclass
class Moment:
    """One second of a simulation. `waiting`: requests that no pod runs yet."""

    second: int
    decision: Decision
    serving: int
    requests: float
    waiting: float


@dataclass
class SimulatedService:
    """One service. A pod runs at most `slots` requests at a time, each for `request_seconds`."""

    policy: Autoscaling
    replicas: int = 1
    start_seconds: int = 40
    slots: int = 32
    request_seconds: float = 8.0
    memory: Memory = field(default_factory=Memory)
    history: list[Moment] = field(default_factory=list)
    _ready_at: list[int] = field(default_factory=list)
    _second: int = 0
    _running: float = 0.0
    _waiting: float = 0.0
    _accepted: float = 0.0

    def __post_init__(self) -> None:
        """Begin with pods that serve."""
        self._ready_at = [0] * self.replicas

    def run(self, seconds: int, rate: Callable[[int], float]) -> list[Moment]:
        """Simulate, with `rate(second)` requests a second; return these seconds."""
        begun = len(self.history)
        for _ in range(seconds):
            self._step(rate(self._second))
        return self.history[begun:]

    def _step(self, rate: float) -> None:
        self._second += 1
        serving = sum(at <= self._second for at in self._ready_at)
        self._accepted += rate
        self._running -= self._running / self.request_seconds
        self._waiting += rate
        begin = max(0.0, min(self._waiting, serving * self.slots - self._running))
        self._waiting -= begin
        self._running += begin
        seen = Observation(
            now=float(self._second),
            replicas=self.replicas,
            loads=(self._load(serving),) * serving,
            loading=len(self._ready_at) - serving,
            start_seconds=self.start_seconds,
        )
        decision = decide(self.policy, seen, self.memory)
        if decision.replicas < self.replicas:  # a ReplicaSet removes those that load first
            assert not seen.loading or decision.replicas == self.policy.max_replicas, decision
            del self._ready_at[decision.replicas :]
        self._ready_at += [self._second + self.start_seconds] * (decision.replicas - len(self._ready_at))
        self.replicas = decision.replicas
        requests = self._running + self._waiting
        self.history.append(Moment(self._second, decision, serving, requests, self._waiting))

    def _load(self, serving: int) -> PodLoad:
        """Return the load of each pod, over which requests are spread evenly."""
        waiting = self._waiting / serving
        busy = self._running / (serving * self.slots)
        throughput = serving * self.slots / self.request_seconds
        return PodLoad(
            running=self._running / serving,
            waiting=waiting,
            queued_tokens=waiting * PROMPT_TOKENS,
            kv_usage=0.9 * busy,
            ttft_seconds=0.2 + self._waiting / throughput if self._running else None,
            accepted=self._accepted / serving,
        )


def changes(history: list[Moment]) -> list[tuple[int, int]]:
    """Return the seconds at which the number of pods changed, and the new number."""
    found, before = [], history[0].decision.replicas
    for moment in history:
        if moment.decision.replicas != before:
            before = moment.decision.replicas
            found.append((moment.second, before))
    return found
