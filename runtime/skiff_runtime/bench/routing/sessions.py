"""Workloads of the simulated cluster: sessions whose prompts share beginnings, as traffic of their kind does.

Tokens are random numbers, so that different texts share nothing; a token has ``BYTES_PER_TOKEN`` bytes of text.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from skiff_runtime.kvcache.block_hash import hash_blocks
from skiff_runtime.kvcache.prefix_cache import Int32
from skiff_runtime.prompt_blocks import HASH_DTYPE, PROMPT_BLOCK_BYTES, PromptBlocks

BYTES_PER_TOKEN: Final = 4
_BLOCK_TOKENS: Final = PROMPT_BLOCK_BYTES // BYTES_PER_TOKEN


@dataclass(eq=False, slots=True)
class SimulatedRequest:
    """One request. ``key``: what consistent hashing goes by, the first 100 characters that a session alone has."""

    session: "Session"
    prompt: Int32
    output: Int32
    key: int
    arrived_at: float = 0.0
    first_token_at: float = 0.0
    cached_tokens: int = 0
    blocks: PromptBlocks = field(init=False)
    block_names: list[int] = field(init=False)

    def __post_init__(self) -> None:
        """Name the prompt's blocks."""
        whole = len(self.prompt) // _BLOCK_TOKENS * _BLOCK_TOKENS
        self.block_names = hash_blocks(self.prompt[:whole], _BLOCK_TOKENS, parent=None)
        names = np.array(self.block_names, HASH_DTYPE).tobytes()
        self.blocks = PromptBlocks(names, len(self.prompt) * BYTES_PER_TOKEN)


@dataclass(eq=False, slots=True)
class Session:
    """A client: the seconds that it waits before each request, and the requests, which come one after another."""

    turns: Iterator[tuple[float, SimulatedRequest]] = field(default_factory=lambda: iter(()))


class Workload(Protocol):
    """A kind of traffic. ``requests_per_session``: mean. ``session_seconds``: typical duration without any queue."""

    requests_per_session: float
    session_seconds: float

    def make_session(self, random: np.random.Generator, *, running: bool) -> Session:
        """Return a new session; with ``running`` one that is somewhere in its middle."""


def _text(random: np.random.Generator, tokens: float) -> Int32:
    return random.integers(0, 1 << 30, max(1, int(tokens)), dtype=np.int32)


def _lengths(random: np.random.Generator, mean: float) -> int:
    """Draw a length of a log-normal distribution, whose 99th percentile is about six times the mean."""
    return max(1, int(random.lognormal(np.log(mean) - 0.32, 0.8)))


class _Conversations(ABC):
    """Base of sessions whose prompts are the whole history: the last prompt, its answer, and something new."""

    def make_session(self, random: np.random.Generator, *, running: bool) -> Session:
        """Return a conversation."""
        session = Session()
        session.turns = self._take_turns(session, random, running=running)
        return session

    @abstractmethod
    def _take_turns(
        self, session: Session, random: np.random.Generator, *, running: bool
    ) -> Iterator[tuple[float, SimulatedRequest]]:
        """Yield each request with the seconds before it."""


def _continue_history(
    session: Session,
    random: np.random.Generator,
    history: Int32,
    *,
    turns: int,
    running: bool,
    prompt_tokens: float,
    output_tokens: float,
    pause_seconds: float,
) -> Iterator[tuple[float, SimulatedRequest]]:
    """Yield the requests of one conversation that begins with ``history``; new tokens and pauses are means."""
    past = int(random.integers(turns)) if running else 0
    key = int(random.integers(1 << 62))
    for turn in range(turns):
        prompt = np.concatenate([history, _text(random, _lengths(random, prompt_tokens))])
        output = _text(random, _lengths(random, output_tokens))
        history = np.concatenate([prompt, output])
        if turn >= past:
            pause = float(random.exponential(pause_seconds)) if turn else 0.0
            yield pause, SimulatedRequest(session, prompt, output, key)


class Chat(_Conversations):
    """Conversations of 1 to 24 turns, 6 on average, under one of 8 system prompts of 500 tokens; people think for 4 s."""

    requests_per_session = 6.0
    session_seconds = 36.0

    def __init__(self, random: np.random.Generator) -> None:
        self._systems = [_text(random, 500) for _ in range(8)]

    def _take_turns(
        self, session: Session, random: np.random.Generator, *, running: bool
    ) -> Iterator[tuple[float, SimulatedRequest]]:
        system = self._systems[int(random.integers(len(self._systems)))]
        yield from _continue_history(
            session,
            random,
            system,
            turns=min(24, int(random.geometric(1 / self.requests_per_session))),
            running=running,
            prompt_tokens=120,
            output_tokens=250,
            pause_seconds=4.0,
        )


class Agents(_Conversations):
    """Agents under 16 system prompts of 6,000 tokens, some much more used than others, which call tools 10 times."""

    requests_per_session = 10.0
    session_seconds = 25.0

    def __init__(self, random: np.random.Generator) -> None:
        self._systems = [_text(random, 6000) for _ in range(16)]
        self._weights = 1 / np.arange(1, 17)
        self._weights /= self._weights.sum()

    def _take_turns(
        self, session: Session, random: np.random.Generator, *, running: bool
    ) -> Iterator[tuple[float, SimulatedRequest]]:
        system = self._systems[int(random.choice(16, p=self._weights))]
        yield from _continue_history(
            session,
            random,
            system,
            turns=10,
            running=running,
            prompt_tokens=400,
            output_tokens=120,
            pause_seconds=1.5,
        )


class FewShot:
    """Single requests under 64 heads of 4,000 tokens, some much more used than others, with short questions."""

    requests_per_session = 1.0
    session_seconds = 0.0

    def __init__(self, random: np.random.Generator) -> None:
        self._heads = [_text(random, 4000) for _ in range(64)]
        self._weights = 1 / np.arange(1, 65) ** 0.8
        self._weights /= self._weights.sum()

    def make_session(self, random: np.random.Generator, *, running: bool) -> Session:
        """Return one question."""
        session = Session()
        head = int(random.choice(64, p=self._weights))
        prompt = np.concatenate([self._heads[head], _text(random, _lengths(random, 150))])
        request = SimulatedRequest(session, prompt, _text(random, _lengths(random, 64)), head)
        session.turns = iter([(0.0, request)])
        return session


class Unrelated:
    """Single requests that share nothing: prompts of 1,000 tokens and answers of 250 on average."""

    requests_per_session = 1.0
    session_seconds = 0.0

    def __init__(self, random: np.random.Generator) -> None:
        """``random`` is not needed: nothing is shared."""

    def make_session(self, random: np.random.Generator, *, running: bool) -> Session:
        """Return one request."""
        session = Session()
        request = SimulatedRequest(
            session,
            _text(random, _lengths(random, 1000)),
            _text(random, _lengths(random, 250)),
            int(random.integers(1 << 62)),
        )
        session.turns = iter([(0.0, request)])
        return session


@dataclass(frozen=True, slots=True)
class WorkloadKind:
    """A workload with the requests a second of a pod at which it is simulated, and how it is described."""

    make: type[Chat | Agents | FewShot | Unrelated]
    requests_per_second: float
    text: str


WORKLOADS: Final[dict[str, WorkloadKind]] = {
    "chat": WorkloadKind(Chat, 16.0, "conversations with growing histories, 8 system prompts of 500 tokens"),
    "agents": WorkloadKind(Agents, 14.0, "10 calls each, 16 system prompts of 6,000 tokens, Zipf"),
    "few-shot": WorkloadKind(
        FewShot, 24.0, "64 heads of 4,000 tokens, Zipf 0.8, short questions and answers"
    ),
    "random": WorkloadKind(Unrelated, 14.0, "nothing shared, 1,000 tokens in and 250 out"),
}
