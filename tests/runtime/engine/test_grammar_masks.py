"""Answers under grammars: each matches, with overlapped steps, chunked prompts, preemptions and other rows beside it."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema
import pytest
import xgrammar
from engine_driver import GREEDY, Driver, Row, make_engine
from grammar_factory import GrammarFactory
from tiny_models import edit_json, make_model
from tiny_tokenizer import EOS_ID

from skiff_runtime.engine.engine import Engine
from skiff_runtime.grammar.matcher import LoadedGrammarCache
from skiff_runtime.messages import NO_TOKEN, CompiledGrammar, SamplingSpec
from skiff_runtime.step import StepHandle

STEPS = 60
PROMPT = list(range(10, 31))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-zäöü東]{0,6}$"},
        "kind": {"enum": ["boat", "pod"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
REGEXES = ("(yes|no|perhaps)", "[a-f0-9]{4}-[a-f0-9]{4}", "[A-Z][a-zäöü]{3,9}( [a-z]{1,4})?!")


def params(**changes: Any) -> SamplingSpec:
    return SamplingSpec(**{"max_tokens": STEPS, "seed": 0, "temperature": 1.5, **changes})


class Made(GrammarFactory):
    """A model, its grammars, and an engine."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.engine = make_engine(path, page_size=4)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    made = Made(make_model(tmp_path_factory.mktemp("model"), "llama", seed=31))
    yield made
    made.engine.close()


Asked = tuple[SamplingSpec, CompiledGrammar | None]


def answers(
    engine: Engine, asked: Sequence[Asked], *, overlap: bool, chunk: int = 64, steps: int = STEPS
) -> list[list[int]]:
    """``steps`` tokens of each request, all at once, up to its end token; ``overlap``: one step is always in flight."""
    driver = Driver(engine, 4)
    rows = [
        driver.open(slot, PROMPT, sampling, grammar=grammar) for slot, (sampling, grammar) in enumerate(asked)
    ]
    while rows[0].done < len(PROMPT):
        handle = driver.launch([(row, min(chunk, len(PROMPT) - row.done)) for row in rows])
    take(handle, rows)
    flights: list[StepHandle] = []
    for _ in range(steps - 1):
        flights.append(driver.launch([(row, 1) for row in rows], decode_rows=len(rows)))
        if not overlap or len(flights) > 1:
            take(flights.pop(0), rows)
    for flight in flights:
        take(flight, rows)
    return [until_end(row.output) for row in rows]


def take(handle: StepHandle, rows: Sequence[Row]) -> None:
    for row, token in zip(rows, handle.result().tokens.tolist(), strict=True):
        row.output.append(token)


def until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS_ID) + 1] if EOS_ID in tokens else tokens


def text(made: Made, tokens: list[int]) -> str:
    """What a finished answer says."""
    assert tokens[-1] == EOS_ID, "not finished"
    return made.written(tokens[:-1]).decode()


def test_every_answer_matches(made: Made) -> None:
    """The same with and without overlap, in chunks or whole, alone or beside others; the free row goes its way."""
    schema = made.schema(SCHEMA)
    for seed in range(0, 12, 3):
        asked: list[Asked] = [
            (params(seed=seed + index), made.regex(regex)) for index, regex in enumerate(REGEXES)
        ]
        asked += [(params(seed=seed + 100), None), (params(seed=seed + 50, top_k=40), schema)]
        together = answers(made.engine, asked, overlap=True, chunk=8)
        for regex, tokens in zip(REGEXES, together, strict=False):
            assert re.fullmatch(regex, text(made, tokens))
        jsonschema.validate(json.loads(text(made, together[4])), SCHEMA)
        assert together[3] == answers(made.engine, asked[3:4], overlap=True)[0]
        if seed < 9:
            assert together == answers(made.engine, asked, overlap=False)
            assert together[4] == answers(made.engine, asked[4:], overlap=False)[0]


def test_greedy_edits_and_logprobs_beside_a_grammar(made: Made) -> None:
    """The grammar has the last word: no bias opens it, and before ``min_tokens`` it ends where it must."""
    asked: list[Asked] = [
        (
            params(temperature=0.0, logit_bias=((EOS_ID, 100.0), (40, 100.0)), logprobs=2),
            made.regex("[ab]{20}"),
        ),
        (params(temperature=0.0, min_tokens=30), made.regex("[ab]{5}")),
        (params(min_tokens=12), made.regex("(a|b)*")),
    ]
    forced, short, long = answers(made.engine, asked, overlap=True)
    assert re.fullmatch("[ab]{20}", text(made, forced))
    assert re.fullmatch("[ab]{5}", text(made, short))
    assert EOS_ID not in long[:12] and re.match("[ab]{12}", "".join(chr(byte) for byte in made.written(long)))


def test_a_retraction_goes_on_where_the_answer_was(made: Made) -> None:
    sampling, grammar = params(seed=5), made.schema(SCHEMA)
    whole = answers(made.engine, [(sampling, grammar)], overlap=False)[0]
    for kept in (1, 7, len(whole) - 1):
        driver = Driver(made.engine, 4)
        row = driver.open(3, PROMPT, sampling, output=whole[:kept], grammar=grammar)
        driver.step([(row, row.known)])
        while len(row.output) < len(whole):
            driver.step([(row, 1)], decode_rows=1)
        assert row.output == whole


def test_a_grammar_that_is_still_read_holds_up_nobody(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its own first token is due."""
    read, get = Event(), LoadedGrammarCache.get

    def slow(shelf: LoadedGrammarCache, grammar: CompiledGrammar) -> xgrammar.CompiledGrammar:
        assert read.wait(60)
        return get(shelf, grammar)

    monkeypatch.setattr(LoadedGrammarCache, "get", slow)
    driver = Driver(made.engine, 4)
    free, guided = driver.open(0, PROMPT, GREEDY), driver.open(1, PROMPT, params(), grammar=made.regex("q+"))
    driver.step([(free, len(PROMPT)), (guided, 8)])
    driver.step([(free, 1), (guided, 8)], decode_rows=1)
    due = driver.launch([(free, 1), (guided, guided.known - guided.done)], decode_rows=1)
    assert not due.wait(0.05)
    read.set()
    assert chr(made.written([int(due.result().tokens[1])])[0]) == "q"


def test_a_grammar_that_is_read_ahead_holds_up_no_slot(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is read, a slot opens whose grammar is at hand; the same grammar is then at hand, too."""
    hand, ahead = made.regex("r+"), made.regex("s+")
    reading = made.engine.load_grammar(hand)
    assert reading is not None
    reading.result(60)
    assert made.engine.load_grammar(hand) is None
    read, get = Event(), LoadedGrammarCache.get

    def slow(shelf: LoadedGrammarCache, grammar: CompiledGrammar) -> xgrammar.CompiledGrammar:
        assert grammar.key == hand.key or read.wait(60)
        return get(shelf, grammar)

    monkeypatch.setattr(LoadedGrammarCache, "get", slow)
    reading = made.engine.load_grammar(ahead)
    assert reading is not None
    driver = Driver(made.engine, 4)
    row = driver.open(0, PROMPT, params(), grammar=hand)
    driver.step([(row, row.known)])
    assert chr(made.written(row.output)[0]) == "r" and not reading.done()
    read.set()
    reading.result(60)
    assert made.engine.load_grammar(ahead) is None
    broken = made.engine.load_grammar(CompiledGrammar(b"broken ahead", b"{}"))
    assert broken is not None and broken.result(60) is None, "whoever opens a slot with it is told"


def test_what_cannot_go_on_ends_alone(made: Made) -> None:
    """Data of another vocabulary or none, and an answer that its grammar never admitted."""
    regex = made.regex("a{30}")
    other = xgrammar.TokenizerInfo([b"a", b""], stop_token_ids=[1])
    foreign = xgrammar.GrammarCompiler(other).compile_regex("a").serialize_json().encode()
    driver = Driver(made.engine, 4)
    rows = [
        driver.open(0, PROMPT, params(), grammar=CompiledGrammar(b"broken", b"{}")),
        driver.open(1, PROMPT, GREEDY),
        driver.open(2, PROMPT, params(), grammar=CompiledGrammar(b"foreign", foreign)),
        driver.open(3, PROMPT, params(), output=[60], grammar=regex),
        driver.open(4, PROMPT, params(logprobs=1), grammar=regex),
    ]
    driver.step([(row, row.known) for row in rows])
    driver.step([(row, 1) for row in rows], decode_rows=5)
    alone = Driver(made.engine, 4)
    free = alone.open(6, PROMPT, GREEDY)
    alone.step([(free, free.known)])
    alone.step([(free, 1)], decode_rows=1)
    assert [rows[slot].output[-2:] for slot in (0, 2, 3)] == [[NO_TOKEN] * 2] * 3
    assert rows[1].output == free.output
    assert set(made.written(rows[4].output)) == {ord("a")}


def test_a_model_without_an_end_token_gets_stuck_at_the_end(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama", seed=2)
    edit_json(path / "config.json", eos_token_id=None)
    edit_json(path / "generation_config.json", eos_token_id=None)
    made = Made(path)
    output = answers(made.engine, [(params(), made.regex("[xyz]{3}"))], overlap=True, steps=8)[0]
    made.engine.close()
    assert output[-4:] == [NO_TOKEN] * 4
    assert re.fullmatch(b"[xyz]{3}", made.written(output[: output.index(NO_TOKEN)]))
