"""Cache of loaded grammars: hits, eviction by count and by size, and data that cannot be loaded."""

import pytest
from grammar_factory import GrammarFactory
from tiny_config import write_config
from tiny_tokenizer import write_tokenizer

from skiff_runtime.grammar.loaded_cache import LoadedGrammarCache
from skiff_runtime.messages import CompiledGrammar


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> GrammarFactory:
    directory = tmp_path_factory.mktemp("model")
    write_config(directory)
    write_tokenizer(directory)
    return GrammarFactory(directory)


def test_least_recently_used_grammars_are_evicted(factory: GrammarFactory) -> None:
    grammars = [factory.regex(f"a{{{number}}}") for number in range(1, 6)]
    cache = LoadedGrammarCache(factory.vocabulary, max_grammars=3)
    first = cache.get(grammars[0])
    for grammar in grammars[1:4]:
        assert cache.get(grammars[0]) is first
        cache.get(grammar)
    assert len(cache) == 3
    assert cache.get(corrupt_data(grammars[3])) is cache.get(grammars[3]), (
        "a cached grammar is found by its key"
    )
    with pytest.raises(RuntimeError):
        cache.get(corrupt_data(grammars[1]))


def test_newest_grammar_stays_even_if_it_exceeds_the_size_limit(factory: GrammarFactory) -> None:
    cache = LoadedGrammarCache(factory.vocabulary, max_bytes=1)
    for number in range(1, 6):
        cache.get(factory.regex(f"a{{{number}}}"))
        assert len(cache) == 1


def corrupt_data(grammar: CompiledGrammar) -> CompiledGrammar:
    """Return a grammar of the same key whose data cannot be loaded."""
    return CompiledGrammar(grammar.key, b"{}")
