"""The protocol of the all-reduce kernels, as a model: epochs, two buffers, LL words and flags under any interleaving.

The model runs one channel of several ranks. A store is in flight until the schedule delivers it, in any order; a fence,
and the end of a call, wait until all stores of the rank have arrived. The schedule also decides which rank takes the
next step, so a rank may run ahead of the others as far as the protocol lets it. Every word that is read must hold what
its source sent in the reader's call. A call that is fused with a norm is one of its algorithm here: it reads the same
words, in another order, before it ends.

With timeouts the schedule also decides when the clock of a waiting rank passes the limit, for each thread of a poll on
its own. A rank that has timed out has reported it and may read anything; all others must still read what is theirs.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

SLOTS: Final = 3
MARKS: Final = 16
"""Marks repeat after so many calls (2^32 in the kernels), all words are rewritten in two calls of each PERIOD (2^30)."""
PERIOD: Final = 4


class Call(NamedTuple):
    """One collective: its kind, and its words of each source."""

    kind: str
    words: int


class Word(NamedTuple):
    """What a source sent in a call, and the mark beside it."""

    source: int
    epoch: int
    mark: int


Address = tuple[object, ...]
Choose = Callable[[int], int]


class Wait(NamedTuple):
    """What a rank waits for: ``missing()`` returns for each thread whether its word is missing.

    Waits for peers are bounded. The end of the rank's own stores is waited for without a bound.
    """

    missing: Callable[[], list[bool]]
    bounded: bool

    def is_over(self) -> bool:
        """Return whether nothing is missing any longer."""
        return not any(self.missing())


Step = Wait | None
"""A wait that must end before the rank goes on; None for an ordinary step."""
WAITING, TIMED_OUT = 2, 3
"""States of a wait, as in the kernels; any other means that everything has arrived."""


def reduce_with_stale_first(stale: list[bool], late: list[bool]) -> int:
    """Return the state of a wait by the rule of ``peer_memory.wait_state``."""
    return max(2 * missing + passed for missing, passed in zip(stale, late, strict=True))


def reduce_with_late_first(stale: list[bool], late: list[bool]) -> int:
    """Return the state by a rule that looks right: it takes a late thread without a missing word for the end."""
    state = max(missing + 2 * passed for missing, passed in zip(stale, late, strict=True))
    return {0: 0, 1: WAITING, 2: 0, 3: TIMED_OUT}[state]


class Violation(AssertionError):
    """A rank read a word that is not of its call."""


@dataclass
class Rules:
    """The protocol, and ways to break it."""

    buffers: int = 2
    refresh: bool = True
    refresh_by_all: bool = True
    fence: bool = True
    waits: bool = True
    silent: bool = True
    """A rank that has timed out sets no more flags, and stores nothing in later calls."""
    reduce: Callable[[list[bool], list[bool]], int] = reduce_with_stale_first


@dataclass
class Rank:
    """The memory of a rank, its stores that have not arrived yet (rank, address, value), and its timeout."""

    memory: dict[Address, Word] = field(default_factory=dict)
    in_flight: list[tuple[int, Address, Word]] = field(default_factory=list)
    failed_in: int = 0
    """The call in which a wait timed out; 0 for none."""
    call: int = 0
    stores: bool = True
    """The rank had not timed out when its call began."""


class Model:
    """All ranks of one channel, that run ``calls`` one after the other."""

    def __init__(self, ranks: int, calls: list[Call], rules: Rules, *, timeouts: bool = False) -> None:
        self._calls = calls
        self._rules = rules
        self._timeouts = timeouts
        self.ranks = [Rank() for _ in range(ranks)]

    def run(self, choose: Choose) -> None:
        """Run to the end; ``choose(n)`` picks one of n possible events."""
        programs = {rank: self._run_rank(rank) for rank in range(len(self.ranks))}
        blocked: dict[int, Wait] = {}
        while programs:
            runnable = [rank for rank in programs if rank not in blocked or blocked[rank].is_over()]
            late = [rank for rank in blocked if self._timeouts and self._can_time_out(rank, blocked[rank])]
            stores = [
                (rank, index) for rank, each in enumerate(self.ranks) for index in range(len(each.in_flight))
            ]
            assert runnable or stores or late, "deadlock"
            event = choose(len(runnable) + len(stores) + len(late))
            if event < len(runnable):
                rank = runnable[event]
                blocked.pop(rank, None)
                try:
                    wait = next(programs[rank])
                except StopIteration:
                    del programs[rank]
                    continue
                if wait is not None:
                    blocked[rank] = wait
            elif event >= len(runnable) + len(stores):
                rank = late[event - len(runnable) - len(stores)]
                if self._poll_late(rank, blocked[rank], choose):
                    del blocked[rank]
            else:
                rank, index = stores[event - len(runnable)]
                target, address, word = self.ranks[rank].in_flight.pop(index)
                self.ranks[target].memory[address] = word

    def _can_time_out(self, rank: int, wait: Wait) -> bool:
        return wait.bounded and not wait.is_over()

    def _poll_late(self, rank: int, wait: Wait, choose: Choose) -> bool:
        """Poll while the limit passes, for some threads; return whether the rank goes on."""
        stale = [*wait.missing(), False]  # the last thread is one behind the end of the message
        state = self._rules.reduce(stale, [not choose(2) for _ in stale])
        if state == TIMED_OUT and not self.ranks[rank].failed_in:
            self.ranks[rank].failed_in = self.ranks[rank].call
        return state != WAITING

    def _run_rank(self, rank: int) -> Iterator[Step]:
        state = self.ranks[rank]
        for epoch, call in enumerate(self._calls, 1):
            state.call = epoch
            state.stores = not (state.failed_in and self._rules.silent)
            if call.kind == "words":
                yield from self._send_words(rank, epoch, call.words)
            else:
                yield from self._send_plain(rank, epoch, call, phases=2 if call.kind == "two-shot" else 1)
            yield self._stores_arrive(rank)  # the end of a kernel

    def _store_words(self, rank: int, epoch: int, words: int) -> Iterator[Step]:
        """Store a message as LL words; where all words are rewritten, also what no message needs."""
        refresh = self._rules.refresh and epoch % PERIOD < 2
        for peer in self._peers(rank):
            for slot in range(SLOTS if refresh else words):
                word = Word(rank, epoch, epoch % MARKS)
                self._store(rank, peer, ("word", epoch % self._rules.buffers, rank, slot), word)
                yield None

    def _send_words(self, rank: int, epoch: int, words: int) -> Iterator[Step]:
        mark = epoch % MARKS
        yield from self._store_words(rank, epoch, words)
        sources = {
            ("word", epoch % self._rules.buffers, source, slot): source
            for source in self._peers(rank)
            for slot in range(words)
        }
        if self._rules.waits:
            yield from self._wait(rank, lambda: [self._mark(rank, address) != mark for address in sources])
        for address, source in sources.items():
            self._check(rank, address, source, epoch)

    def _send_plain(self, rank: int, epoch: int, call: Call, *, phases: int) -> Iterator[Step]:
        mine = Word(rank, epoch, epoch)

        def place(phase: int, source: int, slot: int) -> Address:
            """Both kinds divide the same memory: one-shot into as many regions as ranks, two-shot into twice as many."""
            region = (phase * len(self.ranks) + source) * (2 * SLOTS // phases)
            return "plain", epoch % self._rules.buffers, region + slot

        if self._rules.refresh_by_all:
            yield from self._store_words(rank, epoch, 0)
        for phase in range(phases):
            for peer in self._peers(rank):
                for slot in range(call.words):
                    self._store(rank, peer, place(phase, rank, slot), mine)
                    yield None
            if self._rules.fence:
                yield self._stores_arrive(rank)
            for peer in self._peers(rank):
                if not (self.ranks[rank].failed_in and self._rules.silent):
                    self._store(rank, peer, ("flag", phase, rank), mine)
                yield None
            flags: list[Address] = [("flag", phase, source) for source in self._peers(rank)]
            yield from self._wait(rank, partial(self._find_unset, rank, flags, epoch))
            for source in self._peers(rank):
                for slot in range(call.words):
                    self._check(rank, place(phase, source, slot), source, epoch)
                    yield None

    def _peers(self, rank: int) -> list[int]:
        return [peer for peer in range(len(self.ranks)) if peer != rank]

    def _store(self, rank: int, peer: int, address: Address, word: Word) -> None:
        if self.ranks[rank].stores:
            self.ranks[rank].in_flight.append((peer, address, word))

    def _wait(self, rank: int, missing: Callable[[], list[bool]]) -> Iterator[Step]:
        """Wait for words of peers, unless the rank has timed out before."""
        if not self.ranks[rank].failed_in:
            yield Wait(missing, bounded=True)

    def _stores_arrive(self, rank: int) -> Wait:
        return Wait(lambda: [bool(self.ranks[rank].in_flight)], bounded=False)

    def _mark(self, rank: int, address: Address) -> int:
        word = self.ranks[rank].memory.get(address)
        return 0 if word is None else word.mark

    def _find_unset(self, rank: int, flags: list[Address], epoch: int) -> list[bool]:
        return [self._mark(rank, flag) < epoch for flag in flags]

    def _check(self, rank: int, address: Address, source: int, epoch: int) -> None:
        if self.ranks[rank].failed_in:
            return
        word = self.ranks[rank].memory.get(address)
        if word is None or (word.source, word.epoch) != (source, epoch):
            raise Violation(f"rank {rank} in call {epoch} read {word} at {address}")


CALLS: Final = st.lists(
    st.builds(Call, st.sampled_from(["words", "one-shot", "two-shot"]), st.integers(1, SLOTS)),
    min_size=1,
    max_size=3 * MARKS // 2,
)


@given(st.integers(2, 4), CALLS, st.randoms(use_true_random=False))
def test_every_read_is_of_its_call(ranks: int, calls: list[Call], schedule: random.Random) -> None:
    Model(ranks, calls, Rules()).run(schedule.randrange)


@given(st.integers(2, 4), CALLS)
def test_rank_that_runs_ahead_as_far_as_it_can(ranks: int, calls: list[Call]) -> None:
    """The first of the possible events is always taken, or the last: one rank runs as long as nothing stops it."""
    Model(ranks, calls, Rules()).run(lambda _: 0)
    Model(ranks, calls, Rules()).run(lambda count: count - 1)


@given(st.integers(2, 4), CALLS, st.randoms(use_true_random=False))
def test_timeouts_of_any_rank_reach_all_ranks_and_no_wrong_read_is_unreported(
    ranks: int, calls: list[Call], schedule: random.Random
) -> None:
    """A rank completes no call behind the one in which another timed out: it waits in vain, and reports as well."""
    model = Model(ranks, calls, Rules(), timeouts=True)
    model.run(schedule.randrange)
    failed_in = [rank.failed_in for rank in model.ranks]
    first = min((call for call in failed_in if call), default=len(calls))
    if first < len(calls):
        assert all(first <= call <= first + 1 for call in failed_in)


def find_violation(
    ranks: int, calls: list[Call], rules: Rules, *, timeouts: bool = False
) -> Violation | None:
    """Return a violation that one of two hundred random schedules finds.

    With timeouts there are as many more schedules that prefer the first ranks, which so run ahead of the last one.
    """
    for seed in range(400 if timeouts else 200):
        generator = random.Random(seed)

        def choose(count: int, generator: random.Random = generator, *, skewed: bool = seed >= 200) -> int:
            first = generator.randrange(count)
            return min(first, generator.randrange(count)) if skewed else first

        try:
            Model(ranks, calls, rules, timeouts=timeouts).run(choose)
        except Violation as violation:
            return violation
    return None


ONE_SHOT: Final = [Call("one-shot", 1)] * 6
LONG_THEN_SHORT: Final = [Call("words", 2), *[Call("words", 1)] * (MARKS - 1), Call("words", 2)]
WORDS_ARE_RARE: Final = [
    Call("words" if epoch in (2, 2 + MARKS) else "one-shot", 1) for epoch in range(1, 3 + MARKS)
]


@pytest.mark.parametrize(
    ("calls", "rules"),
    [
        pytest.param(ONE_SHOT, Rules(buffers=1), id="one buffer"),
        pytest.param(ONE_SHOT, Rules(fence=False), id="no fence"),
        pytest.param(LONG_THEN_SHORT, Rules(refresh=False), id="marks that repeat"),
        pytest.param(WORDS_ARE_RARE, Rules(refresh_by_all=False), id="marks that repeat behind other calls"),
        pytest.param([Call("words", 1)] * 3, Rules(waits=False), id="no wait"),
    ],
)
def test_each_rule_is_needed(calls: list[Call], rules: Rules) -> None:
    """Without it the model finds a wrong read, and with it none, so the model can tell them apart."""
    assert find_violation(2, calls, rules) is not None
    assert find_violation(2, calls, Rules()) is None


@pytest.mark.parametrize(
    ("calls", "rules"),
    [
        pytest.param(ONE_SHOT, Rules(silent=False), id="one-shot goes on to store"),
        pytest.param([Call("two-shot", 1)] * 6, Rules(silent=False), id="two-shot goes on to store"),
        pytest.param([Call("words", 2)] * 2, Rules(reduce=reduce_with_late_first), id="late words"),
        pytest.param(ONE_SHOT, Rules(reduce=reduce_with_late_first), id="late flags"),
    ],
)
def test_each_rule_of_timeouts_is_needed(calls: list[Call], rules: Rules) -> None:
    """Without it a rank that has reported nothing reads what is not of its call."""
    assert find_violation(3, calls, rules, timeouts=True) is not None
    assert find_violation(3, calls, Rules(), timeouts=True) is None
