"""Sampling parameters and grammars of requests."""

from enum import StrEnum

from msgspec import Struct


class SamplingSpec(Struct, frozen=True, array_like=True):
    """The sampling parameters of one request between processes. ``temperature`` 0 is greedy; ``top_k`` 0 is off.

    ``min_tokens``: before this many output tokens, neither an end of sequence nor a stop token is sampled, and
    stop strings are ignored. ``presence_penalty`` and ``frequency_penalty`` count output tokens,
    ``repetition_penalty`` prompt tokens, too. ``logit_bias``: pairs of a token id and the value added to its
    logit. ``logprobs``: number of top log-probabilities returned with that of each output token; None: no
    log-probabilities. ``prompt_logprobs``: the same for the prompt, which is then computed whole, without a
    cached prefix. ``bad_words``: sequences of tokens; the last token of each is never sampled after the others.
    ``allowed_token_ids``: the only tokens that are sampled; () for all. ``fits_context``: if ``max_tokens`` exceeds
    what context and KV cache leave, it is lowered to that instead of being refused.
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
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    fits_context: bool = False


class GrammarKind(StrEnum):
    """The language of a grammar's source."""

    JSON = "json"
    """Any JSON object; the source is empty."""
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    """GBNF, in the dialect of llama.cpp and xgrammar."""
    STRUCTURAL_TAG = "structural_tag"
    """xgrammar's JSON description of text with tagged parts, such as tool calls."""


class Grammar(Struct, frozen=True, array_like=True):
    """A constraint on the text of an answer (structured output)."""

    kind: GrammarKind
    source: str = ""


class CompiledGrammar(Struct, frozen=True, array_like=True):
    """A grammar compiled for the model's vocabulary, serialized by xgrammar. Equal keys mean equal data."""

    key: bytes
    data: bytes
