"""What a load consists of: prompts, output lengths and moments of arrival, all from a seed."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from skiff_runtime.bench.values import Span
from skiff_runtime.errors import ConfigError

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


class _Line(msgspec.Struct):
    """One line of a dataset file."""

    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    output_tokens: int | None = None


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
        words = generator.integers(0, len(WORDS), size=inputs.draw(generator)).tolist()
        text = " ".join(WORDS[word] for word in words)
        samples.append(Sample([{"role": "user", "content": text}], outputs.draw(generator)))
    return samples


def read_dataset(
    path: Path, count: int, outputs: Span, *, chat: bool, generator: np.random.Generator
) -> list[Sample]:
    """``count`` samples from a JSON-lines file, in a seeded random order, again from the start if it is short.

    A line is ``{"prompt": TEXT}`` or ``{"messages": [...]}``, with an optional ``"output_tokens"``.
    """
    try:
        lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"--dataset {path}: {error.strerror}") from error
    samples = [_sample(path, number, line, outputs, chat, generator) for number, line in enumerate(lines, 1)]
    if not samples:
        raise ConfigError(f"--dataset {path} is empty")
    order = generator.permutation(len(samples)).tolist()
    return [samples[order[index % len(order)]] for index in range(count)]


def _sample(
    path: Path, number: int, line: bytes, outputs: Span, chat: bool, generator: np.random.Generator
) -> Sample:
    try:
        entry = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--dataset {path}, line {number}: {error}") from error
    length = outputs.draw(generator) if entry.output_tokens is None else entry.output_tokens
    if length < 1:
        raise ConfigError(f"--dataset {path}, line {number}: output_tokens must be at least 1")
    if chat and entry.messages is None and entry.prompt is not None:
        return Sample([{"role": "user", "content": entry.prompt}], length)
    prompt: Prompt | None = entry.messages if chat else entry.prompt
    if not prompt:
        wanted = "prompt or messages" if chat else "prompt"
        raise ConfigError(f"--dataset {path}, line {number}: {wanted} is needed for this --endpoint")
    return Sample(prompt, length)


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
