"""Which texts a compiled grammar admits, by xgrammar itself."""

from pathlib import Path

import xgrammar

from skiff_runtime.grammar.vocabulary import read_vocabulary
from skiff_runtime.messages import CompiledGrammar
from skiff_runtime.models.config import read_model_config


def admits(model: Path, grammar: CompiledGrammar | None, text: str) -> bool:
    """Whether ``text`` may be all of an answer of the model in this directory."""
    assert grammar is not None
    vocabulary = read_vocabulary(read_model_config(model))
    compiled = xgrammar.CompiledGrammar.deserialize_json(grammar.data.decode(), vocabulary)
    matcher = xgrammar.GrammarMatcher(compiled)
    if not matcher.accept_string(text):
        return False
    mask = xgrammar.allocate_token_bitmask(1, vocabulary.vocab_size)
    matcher.fill_next_token_bitmask(mask)
    return any(mask[0, stop // 32] >> stop % 32 & 1 for stop in vocabulary.stop_token_ids)
