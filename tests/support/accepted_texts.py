"""Texts that a compiled grammar accepts, by xgrammar itself."""

from collections.abc import Iterable
from pathlib import Path

import xgrammar

from skiff_runtime.grammar.tokenizer_info import read_tokenizer_info
from skiff_runtime.messages import CompiledGrammar
from skiff_runtime.models.config import read_model_config


def accepted_texts(model: Path, grammar: CompiledGrammar | None, texts: Iterable[str]) -> set[str]:
    """Return those of ``texts`` that are complete answers under the grammar, for the model in this directory."""
    assert grammar is not None
    vocabulary = read_tokenizer_info(read_model_config(model))
    compiled = xgrammar.CompiledGrammar.deserialize_json(grammar.data.decode(), vocabulary)
    return {
        text
        for text in texts
        if _is_accepted(xgrammar.GrammarMatcher(compiled), text, vocabulary.stop_token_ids)
    }


def _is_accepted(matcher: xgrammar.GrammarMatcher, text: str, stops: Iterable[int]) -> bool:
    return matcher.accept_string(text) and any(matcher.accept_token(stop) for stop in stops)
