"""How the tokens of a request are chosen."""

from enum import StrEnum

from msgspec import Struct


class SamplingSpec(Struct, frozen=True, array_like=True):
    """How the tokens of one request are chosen. ``temperature`` 0 is greedy; ``top_k`` 0 is off.

    ``min_tokens``: before so many are out, neither an end of sequence nor a stop token is chosen, and no stop
    string is looked for.
    ``presence_penalty`` and ``frequency_penalty`` count output tokens, ``repetition_penalty`` also the
    prompt's. ``logit_bias``: pairs of token id and what is added to its logit. ``logprobs``: how many of the
    likeliest tokens are told of each output position beside the chosen one, None for nothing at all;
    ``prompt_logprobs`` likewise for the positions of the prompt but the first, which no cached prefix then serves.
    """

    max_tokens: int
    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None


class GrammarKind(StrEnum):
    """What a grammar is written in."""

    JSON = "json"
    """Any JSON object; the source is empty."""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    """GBNF, as llama.cpp and xgrammar read it."""
    STRUCTURAL_TAG = "structural_tag"
    """xgrammar's JSON description of text with tagged parts, such as tool calls."""


class Grammar(Struct, frozen=True, array_like=True):
    """What the text of an answer must match."""

    kind: GrammarKind
    source: str = ""


class CompiledGrammar(Struct, frozen=True, array_like=True):
    """A grammar made ready for the model's vocabulary: xgrammar's serialized form. Equal keys mean equal data."""

    key: bytes
    data: bytes
