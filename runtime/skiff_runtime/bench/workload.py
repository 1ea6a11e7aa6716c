"""What a load consists of: prompts, output lengths and moments of arrival, all from a seed."""

import math
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from skiff_runtime.bench.flag_types import Span

_COMMON: Final = (
    "the of to in is on for with as by at from or an be this that it are was not but have has they you we he "
    "she will can one all would there their what so up out if about who get which go me when make like time no "
    "just him know take people into year your good some could them see other than then now look only come its "
    "over think also back after use two how our work first well way even new want because any these give day most"
)
WORDS: Final = tuple(_COMMON.split())
"""Short, common words: about one token each in any tokenizer."""

Messages = list[dict[str, str]]
Prompt = list[int] | str | Messages


@dataclass(frozen=True, slots=True)
class Sample:
    """One request to be made: token ids, a text, or a conversation; and how many tokens to ask for."""

    prompt: Prompt
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Prefixes:
    """A workload whose prompts share their beginnings: how many groups, prompts in each, and tokens they share."""

    groups: int
    per_group: int
    tokens: int


def random_tokens(
    count: int, inputs: Span, outputs: Span, vocabulary: int, generator: np.random.Generator
) -> list[Sample]:
    """Prompts of random token ids below ``vocabulary``: no two share a prefix worth speaking of."""
    samples = []
    for _ in range(count):
        ids: list[int] = generator.integers(0, vocabulary, size=inputs.draw(generator)).tolist()
        samples.append(Sample(ids, outputs.draw(generator)))
    return samples


def random_texts(count: int, inputs: Span, outputs: Span, generator: np.random.Generator) -> list[Sample]:
    """Conversations of one message of random words, about one token a word."""
    samples = []
    for _ in range(count):
        text = _words(inputs.draw(generator), generator)
        samples.append(Sample([{"role": "user", "content": text}], outputs.draw(generator)))
    return samples


def shared_prefixes(
    plan: Prefixes, inputs: Span, outputs: Span, vocabulary: int, generator: np.random.Generator
) -> list[Sample]:
    """Token-id prompts of ``plan.groups`` groups in a random order; those of a group begin alike.

    ``inputs`` is the length of each prompt's own end, after the shared prefix.
    """
    prefixes = generator.integers(0, vocabulary, size=(plan.groups, plan.tokens)).tolist()
    samples = []
    for group in _group_order(plan, generator):
        own: list[int] = generator.integers(0, vocabulary, size=inputs.draw(generator)).tolist()
        samples.append(Sample(prefixes[group] + own, outputs.draw(generator)))
    return samples


def shared_texts(plan: Prefixes, inputs: Span, outputs: Span, generator: np.random.Generator) -> list[Sample]:
    """As ``shared_prefixes``, in words: the prefix is the system message, as it is in most services."""
    prefixes = [_words(plan.tokens, generator) for _ in range(plan.groups)]
    samples = []
    for group in _group_order(plan, generator):
        messages = [
            {"role": "system", "content": prefixes[group]},
            {"role": "user", "content": _words(inputs.draw(generator), generator)},
        ]
        samples.append(Sample(messages, outputs.draw(generator)))
    return samples


def _group_order(plan: Prefixes, generator: np.random.Generator) -> list[int]:
    order: list[int] = generator.permutation(np.repeat(np.arange(plan.groups), plan.per_group)).tolist()
    return order


def _words(count: int, generator: np.random.Generator) -> str:
    return " ".join(WORDS[word] for word in generator.integers(0, len(WORDS), size=count).tolist())


def arrivals(count: int, per_second: float, generator: np.random.Generator) -> list[float]:
    """Seconds after the start at which requests arrive: a Poisson process, or all at once for ``inf``."""
    if math.isinf(per_second):
        return [0.0] * count
    gaps = generator.exponential(1.0 / per_second, size=count)
    gaps[0] = 0.0
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def body(sample: Sample, *, model: str, temperature: float, seed: int, ignore_eos: bool) -> bytes:
    """The request's JSON, for /v1/chat/completions if the prompt is a conversation, else /v1/completions."""
    is_chat = isinstance(sample.prompt, list) and isinstance(sample.prompt[0], dict)
    fields: dict[str, Any] = {
        "model": model,
        "messages" if is_chat else "prompt": sample.prompt,
        "max_tokens": sample.output_tokens,
        "temperature": temperature,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode({**fields, "ignore_eos": True} if ignore_eos else fields)
