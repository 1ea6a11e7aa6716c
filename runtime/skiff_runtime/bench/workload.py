"""Synthetic workloads: prompts, output lengths and arrival times, all drawn from a seeded generator."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from skiff_runtime.bench.flag_types import LengthRange

_COMMON: Final = (
    "the of to in is on for with as by at from or an be this that it are was not but have has they you we he "
    "she will can one all would there their what so up out if about who get which go me when make like time no "
    "just him know take people into year your good some could them see other than then now look only come its "
    "over think also back after use two how our work first well way even new want because any these give day most"
)
WORDS: Final = tuple(_COMMON.split())
"""Short and common words, so that each is about one token in any tokenizer."""

Messages = list[dict[str, str]]
Prompt = list[int] | str | Messages


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to send: its prompt (token ids, a text, or a conversation), and the number of tokens to generate."""

    prompt: Prompt
    output_tokens: int


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """Shape of a shared-prefix workload: ``groups`` prefixes of ``tokens`` tokens, each in ``per_group`` prompts."""

    groups: int
    per_group: int
    tokens: int


def draw_token_prompts(
    count: int, inputs: LengthRange, outputs: LengthRange, vocab_size: int, generator: np.random.Generator
) -> list[SampleRequest]:
    """Draw prompts of random token ids below ``vocab_size``. They are too random to share more than a few tokens."""
    samples = []
    for _ in range(count):
        ids: list[int] = generator.integers(0, vocab_size, size=inputs.draw(generator)).tolist()
        samples.append(SampleRequest(ids, outputs.draw(generator)))
    return samples


def draw_chat_prompts(
    count: int, inputs: LengthRange, outputs: LengthRange, generator: np.random.Generator
) -> list[SampleRequest]:
    """Draw conversations of one message of random words, about one token per word."""
    samples = []
    for _ in range(count):
        text = _draw_words(inputs.draw(generator), generator)
        samples.append(SampleRequest([{"role": "user", "content": text}], outputs.draw(generator)))
    return samples


def draw_shared_prefix_tokens(
    shape: PrefixGroups,
    inputs: LengthRange,
    outputs: LengthRange,
    vocab_size: int,
    generator: np.random.Generator,
) -> list[SampleRequest]:
    """Draw token-id prompts in groups that share a prefix, in random order.

    ``inputs`` is the length of the part that follows the shared prefix.
    """
    prefixes = generator.integers(0, vocab_size, size=(shape.groups, shape.tokens)).tolist()
    samples = []
    for group in _draw_order(shape, generator):
        suffix: list[int] = generator.integers(0, vocab_size, size=inputs.draw(generator)).tolist()
        samples.append(SampleRequest(prefixes[group] + suffix, outputs.draw(generator)))
    return samples


def draw_shared_prefix_chats(
    shape: PrefixGroups, inputs: LengthRange, outputs: LengthRange, generator: np.random.Generator
) -> list[SampleRequest]:
    """Draw conversations as ``draw_shared_prefix_tokens`` draws token ids; the prefix is the system message."""
    prefixes = [_draw_words(shape.tokens, generator) for _ in range(shape.groups)]
    samples = []
    for group in _draw_order(shape, generator):
        messages = [
            {"role": "system", "content": prefixes[group]},
            {"role": "user", "content": _draw_words(inputs.draw(generator), generator)},
        ]
        samples.append(SampleRequest(messages, outputs.draw(generator)))
    return samples


def draw_block_tokens(
    prompts: Sequence[tuple[int, Sequence[int]]],
    block_tokens: int,
    vocab_size: int,
    generator: np.random.Generator,
) -> list[list[int]]:
    """Draw prompts of random token ids below ``vocab_size`` from their lengths and the numbers of their blocks.

    Each number stands for ``block_tokens`` tokens. The last block of a prompt is cut to the prompt's length; tokens behind the last
    block are the prompt's own.
    """
    rows: dict[int, int] = {}
    for _, blocks in prompts:
        for block in blocks:
            rows.setdefault(block, len(rows))
    table = generator.integers(0, vocab_size, size=(len(rows), block_tokens))
    drawn = []
    for length, blocks in prompts:
        tokens: list[int] = table[[rows[block] for block in blocks]].reshape(-1)[:length].tolist()
        drawn.append(tokens + generator.integers(0, vocab_size, size=length - len(tokens)).tolist())
    return drawn


def draw_block_chats(
    prompts: Sequence[tuple[int, Sequence[int]]], block_tokens: int, generator: np.random.Generator
) -> list[Messages]:
    """Draw conversations of one message as ``draw_block_tokens`` draws token ids, about one token per word."""
    drawn = draw_block_tokens(prompts, block_tokens, len(WORDS), generator)
    return [[{"role": "user", "content": " ".join(WORDS[word] for word in words)}] for words in drawn]


def draw_arrivals(count: int, per_second: float, generator: np.random.Generator) -> list[float]:
    """Draw the arrival times of a Poisson process, in seconds after the start; all are 0 for a rate of ``inf``."""
    if math.isinf(per_second):
        return [0.0] * count
    gaps = generator.exponential(1.0 / per_second, size=count)
    gaps[0] = 0.0
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def encode_body(
    sample: SampleRequest, *, model: str, temperature: float, seed: int, ignore_eos: bool
) -> bytes:
    """Encode a request as JSON: for /v1/chat/completions if its prompt is a conversation, else /v1/completions."""
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


def _draw_order(shape: PrefixGroups, generator: np.random.Generator) -> list[int]:
    """Draw the group of each prompt."""
    order: list[int] = generator.permutation(np.repeat(np.arange(shape.groups), shape.per_group)).tolist()
    return order


def _draw_words(count: int, generator: np.random.Generator) -> str:
    return " ".join(WORDS[word] for word in generator.integers(0, len(WORDS), size=count).tolist())
