"""Recorded prompts: JSON lines of prompts or messages, and ShareGPT-style JSON."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from skiff_runtime.bench.flag_types import Span
from skiff_runtime.bench.workload import Messages, Prompt, Sample
from skiff_runtime.errors import ConfigError

MAX_FILE_BYTES: Final = 4 << 30
CHARACTERS_PER_TOKEN: Final = 4
"""By which the length of a recorded answer is reckoned: about right for English text."""
_ASSISTANT: Final = ("gpt", "assistant", "chatgpt", "bing", "bard")
_ROLES: Final = {
    "human": "user",
    "user": "user",
    "system": "system",
    **dict.fromkeys(_ASSISTANT, "assistant"),
}


class _Line(msgspec.Struct):
    """One line of a JSON-lines file."""

    prompt: str | None = None
    messages: list[dict[str, str]] | None = None
    output_tokens: int | None = None


class _Turn(msgspec.Struct):
    role: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    """One entry of a ShareGPT file."""

    conversations: list[_Turn] = []


def read_dataset(
    path: Path, count: int, outputs: Span | None, *, chat: bool, generator: np.random.Generator
) -> list[Sample]:
    """``count`` samples from a file, in a seeded random order, again from the start if it is short.

    JSON lines are ``{"prompt": TEXT}`` or ``{"messages": [...]}``, with an optional ``"output_tokens"``; a JSON
    array holds ShareGPT's ``{"conversations": [{"from": "human", "value": TEXT}, ...]}``, of which the turns
    before the first answer are sent. Where a line does not say how many tokens to ask for, ``outputs`` does, and
    without it the length of the recorded answer. ConfigError names the file and line that is malformed.
    """
    samples = _parse(path, outputs, chat, generator)
    if not samples:
        raise ConfigError(f"--dataset {path} is empty")
    order = generator.permutation(len(samples)).tolist()
    return [samples[order[index % len(order)]] for index in range(count)]


def read_bounded(path: Path, flag: str) -> bytes:
    """A whole file; ConfigError, naming the flag that gave it, where it cannot be read or is too large."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{flag} {path} is larger than {MAX_FILE_BYTES >> 30} GiB; cut it")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error


def _parse(path: Path, outputs: Span | None, chat: bool, generator: np.random.Generator) -> list[Sample]:
    data = read_bounded(path, "--dataset")
    if data.lstrip()[:1] == b"[":
        return list(_conversations(path, data, outputs, chat, generator))
    lines = [line for line in data.splitlines() if line.strip()]
    return [_sample(path, number, line, outputs, chat, generator) for number, line in enumerate(lines, 1)]


def _sample(
    path: Path, number: int, line: bytes, outputs: Span | None, chat: bool, generator: np.random.Generator
) -> Sample:
    try:
        entry = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"--dataset {path}, line {number}: {error}") from error
    length = entry.output_tokens
    if length is None:
        length = (outputs or Span(64, 64)).draw(generator)
    if length < 1:
        raise ConfigError(f"--dataset {path}, line {number}: output_tokens must be at least 1")
    if chat and entry.messages is None and entry.prompt is not None:
        return Sample([{"role": "user", "content": entry.prompt}], length)
    prompt: Prompt | None = entry.messages if chat else entry.prompt
    if not prompt:
        wanted = "prompt or messages" if chat else "prompt"
        raise ConfigError(f"--dataset {path}, line {number}: {wanted} is needed for this --endpoint")
    return Sample(prompt, length)


def _conversations(
    path: Path, data: bytes, outputs: Span | None, chat: bool, generator: np.random.Generator
) -> Iterator[Sample]:
    """A sample of each entry that has a question and an answer to it; others, as such files hold, are left out."""
    try:
        entries = msgspec.json.decode(data, type=list[_Conversation])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--dataset {path}: {error}; a JSON array is read as ShareGPT's") from error
    for entry in entries:
        asked, answer = _first_exchange(entry.conversations)
        if not asked or not answer:
            continue
        reckoned = max(1, len(answer) // CHARACTERS_PER_TOKEN)
        length = reckoned if outputs is None else outputs.draw(generator)
        yield Sample(asked if chat else asked[-1]["content"], length)


def _first_exchange(turns: Sequence[_Turn]) -> tuple[Messages, str]:
    """What comes before the first answer, and that answer; empty where there is none."""
    asked: Messages = []
    for turn in turns:
        role = _ROLES.get(turn.role)
        if role == "assistant":
            is_question = bool(asked) and asked[-1]["role"] == "user" and bool(asked[-1]["content"])
            return (asked, turn.value) if is_question else ([], "")
        if role is not None:
            asked.append({"role": role, "content": turn.value})
    return [], ""
