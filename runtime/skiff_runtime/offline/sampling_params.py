"""Sampling parameters of the offline ``LLM``, and their conversion to the messages for scheduler and detokenizer."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from skiff_runtime.config import limits
from skiff_runtime.config.limits import Range
from skiff_runtime.errors import InvalidRequest
from skiff_runtime.grammar.spec import choice_grammar, ebnf_grammar, json_schema_grammar, regex_grammar
from skiff_runtime.messages import Grammar, SamplingSpec, TextOptions
from skiff_runtime.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters and stopping conditions of a completion.

    None stands for the model's recommendation (temperature, top_k, top_p, min_p), the rest of the context
    (max_tokens), or a random number (seed). Temperature 0 is greedy. Each prompt gets ``n`` completions, with
    consecutive seeds. ``logprobs`` and ``prompt_logprobs`` are the numbers of most likely tokens to report for each
    position, besides the token that is there. At most one of ``json_schema`` (a schema, or {} for any JSON),
    ``regex``, ``choice`` and ``grammar`` (GBNF) constrains the text.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    json_schema: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        """Raise InvalidRequest for a parameter that is malformed or out of range."""
        for name, kind, allowed in _RANGES:
            value = getattr(self, name)
            if value is not None and not (_is(value, kind) and allowed.contains(value)):
                what = "a whole number" if kind is int else "a number"
                raise InvalidRequest(f"{name} must be {what} {allowed}, not {value!r}", param=name)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens is {self.min_tokens}, but max_tokens only {self.max_tokens}", param="min_tokens"
            )
        self._check_stops()
        self._check_bias()
        self._check_grammar()

    def to_spec(self, model: ModelConfig) -> SamplingSpec:
        """Return the scheduler's message, in which ``max_tokens`` 0 stands for the rest of the context.

        Raises:
            InvalidRequest: a token id lies outside of the vocabulary of ``model``.
        """
        defaults = model.sampling
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias or ())):
            _check_vocabulary(name, ids, model.vocab_size)
        return SamplingSpec(
            max_tokens=self.max_tokens or 0,
            seed=secrets.randbits(62) if self.seed is None else self.seed,
            temperature=_first(self.temperature, defaults.temperature, 1.0),
            top_k=max(0, int(_first(self.top_k, defaults.top_k, 0))),
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            min_p=_first(self.min_p, defaults.min_p, 0.0),
            ignore_eos=self.ignore_eos,
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple(sorted((self.logit_bias or {}).items())),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def to_text_options(self) -> TextOptions:
        """Return the detokenizer's part."""
        return TextOptions(
            stop=tuple(self.stop),
            skip_special_tokens=self.skip_special_tokens,
            include_stop_str_in_output=self.include_stop_str_in_output,
        )

    def to_grammar(self) -> Grammar | None:
        """Return the grammar that constrains the text, or None."""
        if self.json_schema is not None:
            return json_schema_grammar(self.json_schema, "json_schema")
        if self.regex is not None:
            return regex_grammar(self.regex, "regex")
        if self.choice is not None:
            return choice_grammar(self.choice, "choice")
        return None if self.grammar is None else ebnf_grammar(self.grammar, "grammar")

    def _check_stops(self) -> None:
        if not (_is_list(self.stop, str) and all(self.stop)):
            raise InvalidRequest("stop must be a tuple of strings, none of them empty", param="stop")
        if not _is_list(self.stop_token_ids, int):
            raise InvalidRequest("stop_token_ids must be a tuple of token ids", param="stop_token_ids")
        _at_most("stop", len(self.stop), limits.MAX_STOP_STRINGS)
        _at_most("stop_token_ids", len(self.stop_token_ids), limits.MAX_STOP_TOKENS)
        if any(len(each) > limits.MAX_STOP_STRING_CHARACTERS for each in self.stop):
            raise InvalidRequest(
                f"each string of stop has {limits.MAX_STOP_STRING_CHARACTERS} characters at most",
                param="stop",
            )

    def _check_bias(self) -> None:
        for token, bias in (self.logit_bias or {}).items():
            if not (_is(token, int) and _is(bias, float) and token >= 0 and limits.LOGIT_BIAS.contains(bias)):
                raise InvalidRequest(
                    f"logit_bias maps token ids to numbers {limits.LOGIT_BIAS}, not {token!r} to {bias!r}",
                    param="logit_bias",
                )
        _at_most("logit_bias", len(self.logit_bias or {}), limits.MAX_LOGIT_BIASES)

    def _check_grammar(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InvalidRequest(f"give only one of {' and '.join(given)}", param=given[1])
        if self.choice is not None and not (_is_list(self.choice, str) and self.choice and all(self.choice)):
            raise InvalidRequest("choice must be a tuple of strings, none of them empty", param="choice")
        for name, kind in (("json_schema", str | Mapping), ("regex", str), ("grammar", str)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise InvalidRequest(f"{name} cannot be {value!r}", param=name)


_CONSTRAINTS: Final = ("json_schema", "regex", "choice", "grammar")
_LOGPROBS: Final = Range(0, limits.MAX_LOGPROBS)
_RANGES: Final[tuple[tuple[str, type, Range], ...]] = (
    ("max_tokens", int, Range(1, limits.MAX_OUTPUT_TOKENS)),
    ("min_tokens", int, Range(0, limits.MAX_OUTPUT_TOKENS)),
    ("temperature", float, limits.TEMPERATURE),
    ("top_k", int, limits.TOP_K),
    ("top_p", float, limits.TOP_P),
    ("min_p", float, limits.MIN_P),
    ("seed", int, limits.SEED),
    ("n", int, Range(1, limits.MAX_CHOICES)),
    ("presence_penalty", float, limits.PENALTY),
    ("frequency_penalty", float, limits.PENALTY),
    ("repetition_penalty", float, limits.REPETITION_PENALTY),
    ("logprobs", int, _LOGPROBS),
    ("prompt_logprobs", int, _LOGPROBS),
)


def _is(value: object, kind: type) -> bool:
    """Return whether a value is of a numeric type. An int is a float, too; a bool is neither."""
    return isinstance(value, kind | int) and not isinstance(value, bool)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, tuple | list) and all(isinstance(each, kind) for each in value)


def _check_vocabulary(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{name}: token id {token} is not from 0 to {vocab_size - 1}, the model's vocabulary",
                param=name,
            )


def _at_most(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise InvalidRequest(f"{name} has {count} entries; at most {limit} are served", param=name)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)
