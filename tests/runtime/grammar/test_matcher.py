"""Answers under their grammars, one by one and in batches, and the cache of grammars that are ready for use."""

import numpy as np
import pytest
import torch
import xgrammar
from grammar_factory import GrammarFactory
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny_models import make_model
from tiny_tokenizer import VOCAB_SIZE

from skiff_runtime.grammar.matcher import BatchGrammarMatcher, GrammarMatcher, LoadedGrammarCache
from skiff_runtime.kernels.token_bitmask import apply_token_bitmask
from skiff_runtime.messages import CompiledGrammar

REGEXES = ("(yes|no|perhaps)", "[a-f0-9]{4}-[a-f0-9]{4}", "[A-Z][a-zäöü]{3,9}( [a-z]{1,4})?!")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> GrammarFactory:
    return GrammarFactory(make_model(tmp_path_factory.mktemp("model"), "llama", seed=31))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), pattern=st.sampled_from(REGEXES))
def test_a_mask_admits_exactly_what_can_follow(
    made: GrammarFactory, data: st.DataObject, pattern: str
) -> None:
    """Against the attempt to accept each token of the vocabulary."""
    grammar = made.compiler.compile_regex(pattern)
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    follower, naive = GrammarMatcher(grammar, mask), xgrammar.GrammarMatcher(grammar)
    follower.follow(())
    while follower.bound:
        logits = torch.zeros(3, VOCAB_SIZE)
        apply_token_bitmask(logits, torch.tensor([1]), torch.from_numpy(mask[None]))
        assert not logits[[0, 2]].any()
        admitted = torch.isfinite(logits[1]).nonzero().flatten().tolist()
        assert admitted == [token for token in range(VOCAB_SIZE) if naive.fork().accept_token(token)]
        token = data.draw(st.sampled_from(admitted))
        assert naive.accept_token(token)
        follower.follow((token,))
    assert naive.is_terminated() and not follower.stuck


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    patterns=st.lists(st.sampled_from(REGEXES), min_size=1, max_size=9),
    threads=st.sampled_from([1, 3]),
)
def test_a_batch_goes_on_as_each_answer_would_alone(
    made: GrammarFactory, data: st.DataObject, patterns: list[str], threads: int
) -> None:
    """Answers that end, and tokens that a grammar does not admit, among others; slots in any order."""
    words = -(-VOCAB_SIZE // 32)
    count = len(patterns)
    slots = data.draw(st.permutations(range(count + 2)))[:count]
    together, alone = np.zeros((count + 2, words), np.int32), np.zeros((count, words), np.int32)
    grammars = [made.compiler.compile_regex(pattern) for pattern in patterns]
    batched = [GrammarMatcher(grammar, together[slot]) for grammar, slot in zip(grammars, slots, strict=True)]
    single = [GrammarMatcher(grammar, mask) for grammar, mask in zip(grammars, alone, strict=True)]
    batch = BatchGrammarMatcher(together, threads)
    for follower in (*batched, *single):
        follower.follow(())
    for _ in range(12):
        going = [index for index in range(count) if single[index].bound]
        if not going:
            break
        tokens = [data.draw(st.sampled_from(tokens_of(alone[index]))) for index in going]
        if data.draw(st.booleans()):
            tokens[0] = data.draw(st.integers(0, VOCAB_SIZE - 1))
        batch.follow([batched[each] for each in going], [slots[each] for each in going], tokens)
        for index, token in zip(going, tokens, strict=True):
            single[index].follow((token,))
        states = [[(each.bound, each.stuck) for each in some] for some in (batched, single)]
        assert states[0] == states[1]
        assert np.array_equal(together[slots], alone)


def tokens_of(mask: NDArray[np.int32]) -> list[int]:
    """The tokens that a mask admits."""
    admitted: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return admitted


def test_the_shelf_keeps_what_was_used_last(made: GrammarFactory) -> None:
    grammars = [made.regex(f"a{{{number}}}") for number in range(1, 6)]
    shelf = LoadedGrammarCache(made.vocabulary, max_grammars=3)
    first = shelf.get(grammars[0])
    for grammar in grammars[1:4]:
        assert shelf.get(grammars[0]) is first
        shelf.get(grammar)
    assert len(shelf) == 3
    assert shelf.get(replace_data(grammars[3])) is shelf.get(grammars[3])
    with pytest.raises(RuntimeError):
        shelf.get(replace_data(grammars[1]))
    small = LoadedGrammarCache(made.vocabulary, max_bytes=1)
    assert [(small.get(grammar), len(small))[1] for grammar in grammars] == [1] * 5


def replace_data(grammar: CompiledGrammar) -> CompiledGrammar:
    """With the same key, which is all that is looked at, where the grammar is at hand."""
    return CompiledGrammar(grammar.key, b"{}")
