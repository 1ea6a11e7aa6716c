"""Grammar matchers: masks and states of single answers and of batches, compared with xgrammar's own matcher."""

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

from skiff_runtime.grammar.matcher import BatchGrammarMatcher, GrammarMatcher
from skiff_runtime.kernels.token_bitmask import apply_token_bitmask

REGEXES = ("(yes|no|perhaps)", "[a-f0-9]{4}-[a-f0-9]{4}", "[A-Z][a-zäöü]{3,9}( [a-z]{1,4})?!")


@pytest.fixture(scope="module")
def factory(tmp_path_factory: pytest.TempPathFactory) -> GrammarFactory:
    return GrammarFactory(make_model(tmp_path_factory.mktemp("model"), "llama", seed=31))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), pattern=st.sampled_from(REGEXES))
def test_mask_allows_exactly_the_tokens_that_the_grammar_accepts(
    factory: GrammarFactory, data: st.DataObject, pattern: str
) -> None:
    """The reference tries to accept each token of the vocabulary."""
    grammar = factory.compiler.compile_regex(pattern)
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    matcher, reference = GrammarMatcher(grammar, mask), xgrammar.GrammarMatcher(grammar)
    matcher.accept(())
    while matcher.is_active:
        logits = torch.zeros(3, VOCAB_SIZE)
        apply_token_bitmask(logits, torch.tensor([1]), torch.from_numpy(mask[None]))
        assert not logits[[0, 2]].any()
        allowed = torch.isfinite(logits[1]).nonzero().flatten().tolist()
        assert allowed == [token for token in range(VOCAB_SIZE) if reference.fork().accept_token(token)]
        token = data.draw(st.sampled_from(allowed))
        assert reference.accept_token(token)
        matcher.accept((token,))
    assert reference.is_terminated() and not matcher.is_stuck


@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    patterns=st.lists(st.sampled_from(REGEXES), min_size=1, max_size=9),
    threads=st.sampled_from([1, 3]),
)
def test_batch_advances_as_single_matchers_do(
    factory: GrammarFactory, data: st.DataObject, patterns: list[str], threads: int
) -> None:
    """Answers may end and tokens may be rejected; slots have any order."""
    words = -(-VOCAB_SIZE // 32)
    count = len(patterns)
    slots = data.draw(st.permutations(range(count + 2)))[:count]
    batch_masks, single_masks = np.zeros((count + 2, words), np.int32), np.zeros((count, words), np.int32)
    grammars = [factory.compiler.compile_regex(pattern) for pattern in patterns]
    batched = [
        GrammarMatcher(grammar, batch_masks[slot]) for grammar, slot in zip(grammars, slots, strict=True)
    ]
    single = [GrammarMatcher(grammar, mask) for grammar, mask in zip(grammars, single_masks, strict=True)]
    batch = BatchGrammarMatcher(batch_masks, threads)
    for matcher in (*batched, *single):
        matcher.accept(())
    for _ in range(12):
        active = [index for index in range(count) if single[index].is_active]
        if not active:
            break
        tokens = [data.draw(st.sampled_from(allowed_tokens(single_masks[index]))) for index in active]
        if data.draw(st.booleans()):
            tokens[0] = data.draw(st.integers(0, VOCAB_SIZE - 1))
        batch.accept([batched[each] for each in active], [slots[each] for each in active], tokens)
        for index, token in zip(active, tokens, strict=True):
            single[index].accept((token,))
        states = [[(each.is_active, each.is_stuck) for each in some] for some in (batched, single)]
        assert states[0] == states[1]
        assert np.array_equal(batch_masks[slots], single_masks)


def allowed_tokens(mask: NDArray[np.int32]) -> list[int]:
    """Return the tokens that a mask allows."""
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return tokens
