"""Requests wait for their grammars before they are let in, and nothing else waits with them."""

from concurrent.futures import Future

from scheduler_bench import generate

from skiff_runtime.messages import AbortRequest, CompiledGrammar, FlushCache, GenerateRequest, ToScheduler
from skiff_runtime.worker.grammar_gate import GrammarGate


class Reader:
    """Reads grammars when a test says so."""

    def __init__(self) -> None:
        self.reading: dict[bytes, Future[None]] = {}

    def __call__(self, grammar: CompiledGrammar) -> "Future[None] | None":
        future = self.reading.setdefault(grammar.key, Future())
        return None if future.done() else future


def guided(uid: int, key: bytes) -> GenerateRequest:
    plain = generate(uid, [1, 2], max_tokens=3)
    return GenerateRequest(
        plain.uid, plain.token_ids, plain.sampling, plain.text, grammar=CompiledGrammar(key, b"")
    )


def test_what_needs_no_grammar_passes() -> None:
    items: list[ToScheduler] = [generate(1, [1], max_tokens=1), AbortRequest(1), FlushCache(2)]
    gate = GrammarGate(Reader())
    assert gate.admit(items) == items and len(gate) == 0


def test_a_request_waits_for_its_grammar_alone() -> None:
    reader = Reader()
    gate = GrammarGate(reader)
    first, second, plain = guided(1, b"slow"), guided(2, b"fast"), generate(3, [1], max_tokens=1)
    assert gate.admit([first, second, plain]) == [plain]
    assert 1 in gate and 2 in gate and 3 not in gate
    reader.reading[b"fast"].set_result(None)
    assert gate.admit([]) == [second]
    assert gate.admit([AbortRequest(1), again := guided(4, b"fast")]) == [again], "it is at hand now"
    reader.reading[b"slow"].set_result(None)
    assert gate.admit([AbortRequest(2)]) == [first, AbortRequest(1), AbortRequest(2)]
    assert len(gate) == 0 and gate.admit([]) == []
