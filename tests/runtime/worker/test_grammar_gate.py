"""Requests wait for their grammars before they are let in, and nothing else waits with them."""

from concurrent.futures import Future

from scheduler_bench import generate

from skiff_runtime.messages import (
    AbortRequest,
    CompiledGrammar,
    FlushCache,
    GenerateRequest,
    RankInputs,
    ToScheduler,
    decoder,
    encode,
)
from skiff_runtime.scheduler.channel import SchedulerInput
from skiff_runtime.worker.grammar_gate import GrammarGate
from skiff_runtime.worker.rank_inputs import pack_inputs, unpack_items


class Reader:
    """Reads grammars when a test says so."""

    def __init__(self) -> None:
        self.reading: dict[bytes, Future[None]] = {}

    def __call__(self, grammar: CompiledGrammar) -> "Future[None] | None":
        future = self.reading.setdefault(grammar.key, Future())
        return None if future.done() else future


def guided(uid: int, key: bytes, data: bytes = b"") -> GenerateRequest:
    plain = generate(uid, [1, 2], max_tokens=3)
    return GenerateRequest(
        plain.uid, plain.token_ids, plain.sampling, plain.text, grammar=CompiledGrammar(key, data)
    )


def test_what_needs_no_grammar_passes() -> None:
    items: list[ToScheduler] = [generate(1, [1], max_tokens=1), AbortRequest(1), FlushCache(2)]
    gate = GrammarGate(Reader(), max_released_bytes=1 << 20)
    assert gate.admit(items) == items and len(gate) == 0


def test_a_request_waits_for_its_grammar_alone() -> None:
    reader = Reader()
    gate = GrammarGate(reader, max_released_bytes=1 << 20)
    first, second, plain = guided(1, b"slow"), guided(2, b"fast"), generate(3, [1], max_tokens=1)
    assert gate.admit([first, second, plain]) == [plain]
    assert 1 in gate and 2 in gate and 3 not in gate
    reader.reading[b"fast"].set_result(None)
    assert gate.admit([]) == [second]
    assert gate.admit([AbortRequest(1), again := guided(4, b"fast")]) == [again], "it is at hand now"
    reader.reading[b"slow"].set_result(None)
    assert gate.admit([AbortRequest(2)]) == [first, AbortRequest(1), AbortRequest(2)]
    assert len(gate) == 0 and gate.admit([]) == []


def test_requests_are_let_in_a_few_at_a_time_if_they_are_large() -> None:
    """A grammar counts once, because it is sent to the other ranks once."""
    reader = Reader()
    gate = GrammarGate(reader, max_released_bytes=100)
    requests = [guided(uid, bytes([uid // 4]), bytes(60)) for uid in range(12)]
    assert gate.admit(requests) == []
    for future in reader.reading.values():
        future.set_result(None)
    turns = []
    while gate:
        turns.append(gate.admit([]))
    assert [request for turn in turns for request in turn] == requests
    # Four with one grammar have 60 bytes and 4 * 8, below the limit; the fifth goes beyond it.
    assert [len(turn) for turn in turns] == [5, 4, 3]


def test_other_ranks_get_each_grammar_once() -> None:
    requests = [guided(uid, bytes([uid % 2]), bytes([uid % 2] * 1000)) for uid in range(50)]
    items: list[SchedulerInput] = [generate(99, [1], max_tokens=1), *requests, AbortRequest(3)]
    packed = pack_inputs(items, [CompiledGrammar(b"held", bytes(10))], 7)
    assert [len(each.data) for each in packed.grammars] == [10, 1000, 1000] and packed.checksum == 7
    received: RankInputs = decoder(RankInputs).decode(encode(packed))
    assert unpack_items(received) == items
