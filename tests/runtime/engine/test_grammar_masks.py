"""Answers match their grammars with overlapped steps, chunked prompts, preemptions and other rows in the batch."""

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
from skiff_runtime.grammar.loaded_cache import LoadedGrammarCache
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


class EngineFixture(GrammarFactory):
    """A model, its grammars, and an engine."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.engine = make_engine(path, page_size=4)


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFixture]:
    factory = EngineFixture(make_model(tmp_path_factory.mktemp("model"), "llama", seed=31))
    yield factory
    factory.engine.close()


Request = tuple[SamplingSpec, CompiledGrammar | None]


def generate_all(
    engine: Engine, requests: Sequence[Request], *, overlap: bool, chunk: int = 64, steps: int = STEPS
) -> list[list[int]]:
    """Generate ``steps`` tokens of each request, all at once, up to the end token; ``overlap`` keeps a step in flight."""
    driver = Driver(engine, 4)
    rows = [
        driver.open(slot, PROMPT, sampling, grammar=grammar)
        for slot, (sampling, grammar) in enumerate(requests)
    ]
    while rows[0].done < len(PROMPT):
        handle = driver.launch([(row, min(chunk, len(PROMPT) - row.done)) for row in rows])
    take(handle, rows)
    in_flight: list[StepHandle] = []
    for _ in range(steps - 1):
        in_flight.append(driver.launch([(row, 1) for row in rows], decode_rows=len(rows)))
        if not overlap or len(in_flight) > 1:
            take(in_flight.pop(0), rows)
    for handle in in_flight:
        take(handle, rows)
    return [until_end(row.output) for row in rows]


def take(handle: StepHandle, rows: Sequence[Row]) -> None:
    for row, token in zip(rows, handle.result().tokens.tolist(), strict=True):
        row.output.append(token)


def until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(EOS_ID) + 1] if EOS_ID in tokens else tokens


def text(factory: EngineFixture, tokens: list[int]) -> str:
    """Return the text of a finished answer."""
    assert tokens[-1] == EOS_ID, "not finished"
    return factory.written(tokens[:-1]).decode()


def test_every_answer_matches_its_grammar(factory: EngineFixture) -> None:
    """Answers are the same with and without overlap, with chunked prompts, and alone; a row without a grammar, too."""
    schema = factory.schema(SCHEMA)
    for seed in range(0, 12, 3):
        requests: list[Request] = [
            (params(seed=seed + index), factory.regex(regex)) for index, regex in enumerate(REGEXES)
        ]
        requests += [(params(seed=seed + 100), None), (params(seed=seed + 50, top_k=40), schema)]
        together = generate_all(factory.engine, requests, overlap=True, chunk=8)
        for regex, tokens in zip(REGEXES, together, strict=False):
            assert re.fullmatch(regex, text(factory, tokens))
        jsonschema.validate(json.loads(text(factory, together[4])), SCHEMA)
        assert together[3] == generate_all(factory.engine, requests[3:4], overlap=True)[0]
        if seed < 9:
            assert together == generate_all(factory.engine, requests, overlap=False)
            assert together[4] == generate_all(factory.engine, requests[4:], overlap=False)[0]


def test_grammar_overrides_bias_and_min_tokens(factory: EngineFixture) -> None:
    """No bias admits a token that the grammar excludes, and an answer may end below ``min_tokens`` where it must."""
    requests: list[Request] = [
        (
            params(temperature=0.0, logit_bias=((EOS_ID, 100.0), (40, 100.0)), logprobs=2),
            factory.regex("[ab]{20}"),
        ),
        (params(temperature=0.0, min_tokens=30), factory.regex("[ab]{5}")),
        (params(min_tokens=12), factory.regex("(a|b)*")),
    ]
    forced, short, long = generate_all(factory.engine, requests, overlap=True)
    assert re.fullmatch("[ab]{20}", text(factory, forced))
    assert re.fullmatch("[ab]{5}", text(factory, short))
    assert EOS_ID not in long[:12] and re.match(
        "[ab]{12}", "".join(chr(byte) for byte in factory.written(long))
    )


def test_preempted_request_resumes_with_identical_tokens(factory: EngineFixture) -> None:
    sampling, grammar = params(seed=5), factory.schema(SCHEMA)
    whole = generate_all(factory.engine, [(sampling, grammar)], overlap=False)[0]
    for kept in (1, 7, len(whole) - 1):
        driver = Driver(factory.engine, 4)
        row = driver.open(3, PROMPT, sampling, output=whole[:kept], grammar=grammar)
        driver.step([(row, row.known)])
        while len(row.output) < len(whole):
            driver.step([(row, 1)], decode_rows=1)
        assert row.output == whole


def test_grammar_still_loading_blocks_no_step_before_its_first_token(
    factory: EngineFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the step that samples the first token of its own row waits for it."""
    loaded, get = Event(), LoadedGrammarCache.get

    def slow(cache: LoadedGrammarCache, grammar: CompiledGrammar) -> xgrammar.CompiledGrammar:
        assert loaded.wait(60)
        return get(cache, grammar)

    monkeypatch.setattr(LoadedGrammarCache, "get", slow)
    driver = Driver(factory.engine, 4)
    free, guided = (
        driver.open(0, PROMPT, GREEDY),
        driver.open(1, PROMPT, params(), grammar=factory.regex("q+")),
    )
    driver.step([(free, len(PROMPT)), (guided, 8)])
    driver.step([(free, 1), (guided, 8)], decode_rows=1)
    due = driver.launch([(free, 1), (guided, guided.known - guided.done)], decode_rows=1)
    assert not due.wait(0.05)
    loaded.set()
    assert chr(factory.written([int(due.result().tokens[1])])[0]) == "q"


def test_grammar_loaded_ahead_blocks_no_slot(factory: EngineFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a grammar is loaded, a slot with a cached grammar opens; afterwards the loaded one is cached, too."""
    cached, ahead = factory.regex("r+"), factory.regex("s+")
    loading = factory.engine.load_grammar(cached)
    assert loading is not None
    loading.result(60)
    assert factory.engine.load_grammar(cached) is None
    loaded, get = Event(), LoadedGrammarCache.get

    def slow(cache: LoadedGrammarCache, grammar: CompiledGrammar) -> xgrammar.CompiledGrammar:
        assert grammar.key == cached.key or loaded.wait(60)
        return get(cache, grammar)

    monkeypatch.setattr(LoadedGrammarCache, "get", slow)
    loading = factory.engine.load_grammar(ahead)
    assert loading is not None
    driver = Driver(factory.engine, 4)
    row = driver.open(0, PROMPT, params(), grammar=cached)
    driver.step([(row, row.known)])
    assert chr(factory.written(row.output)[0]) == "r" and not loading.done()
    loaded.set()
    loading.result(60)
    assert factory.engine.load_grammar(ahead) is None
    broken = factory.engine.load_grammar(CompiledGrammar(b"broken ahead", b"{}"))
    assert broken is not None and broken.result(60) is None, "the error is reported when a slot opens with it"


def test_unusable_grammar_ends_its_own_request_alone(factory: EngineFixture) -> None:
    """Unusable are malformed data, another vocabulary, and a grammar that does not admit the output so far."""
    regex = factory.regex("a{30}")
    other = xgrammar.TokenizerInfo([b"a", b""], stop_token_ids=[1])
    foreign = xgrammar.GrammarCompiler(other).compile_regex("a").serialize_json().encode()
    driver = Driver(factory.engine, 4)
    rows = [
        driver.open(0, PROMPT, params(), grammar=CompiledGrammar(b"broken", b"{}")),
        driver.open(1, PROMPT, GREEDY),
        driver.open(2, PROMPT, params(), grammar=CompiledGrammar(b"foreign", foreign)),
        driver.open(3, PROMPT, params(), output=[60], grammar=regex),
        driver.open(4, PROMPT, params(logprobs=1), grammar=regex),
    ]
    driver.step([(row, row.known) for row in rows])
    driver.step([(row, 1) for row in rows], decode_rows=5)
    alone = Driver(factory.engine, 4)
    free = alone.open(6, PROMPT, GREEDY)
    alone.step([(free, free.known)])
    alone.step([(free, 1)], decode_rows=1)
    assert [rows[slot].output[-2:] for slot in (0, 2, 3)] == [[NO_TOKEN] * 2] * 3
    assert rows[1].output == free.output
    assert set(factory.written(rows[4].output)) == {ord("a")}


def test_model_without_end_token_gets_stuck_at_the_end_of_the_grammar(tmp_path: Path) -> None:
    path = make_model(tmp_path, "llama", seed=2)
    edit_json(path / "config.json", eos_token_id=None)
    edit_json(path / "generation_config.json", eos_token_id=None)
    factory = EngineFixture(path)
    output = generate_all(factory.engine, [(params(), factory.regex("[xyz]{3}"))], overlap=True, steps=8)[0]
    factory.engine.close()
    assert output[-4:] == [NO_TOKEN] * 4
    assert re.fullmatch(b"[xyz]{3}", factory.written(output[: output.index(NO_TOKEN)]))
