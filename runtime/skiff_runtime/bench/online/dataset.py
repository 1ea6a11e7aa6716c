"""Datasets of recorded prompts: JSON lines of prompts or messages, and ShareGPT's JSON."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from skiff_runtime.bench.flag_types import LengthRange
from skiff_runtime.bench.workload import Messages, Prompt, SampleRequest
from skiff_runtime.errors import ConfigError

MAX_FILE_BYTES: Final = 4 << 30
CHARACTERS_PER_TOKEN: Final = 4
"""Used to estimate the length of a recorded answer; about right for English text."""
DEFAULT_OUTPUT: Final = LengthRange(64, 64)
_FLAG: Final = "--dataset-path"
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
    path: Path,
    count: int,
    outputs: LengthRange | None,
    *,
    is_sharegpt: bool,
    is_chat: bool,
    generator: np.random.Generator,
) -> list[SampleRequest]:
    """Read ``count`` requests from a file, in seeded random order, starting over if the file has fewer.

    JSON lines are ``{"prompt": TEXT}`` or ``{"messages": [...]}``, with an optional ``"output_tokens"``. ShareGPT's
    JSON is an array of ``{"conversations": [{"from": "human", "value": TEXT}, ...]}``; the turns before the first
    answer are sent. The output length is that of the line, else one of ``outputs``, else the estimated length of the
    recorded answer (ShareGPT) or 64.

    Raises:
        ConfigError: the file is malformed or empty; the message names the line.
    """
    data = read_file(path, _FLAG)
    if is_sharegpt:
        samples = list(_parse_sharegpt(path, data, outputs, is_chat, generator))
    else:
        lines = [line for line in data.splitlines() if line.strip()]
        samples = [
            _parse_line(f"{_FLAG} {path}, line {number}", line, outputs, is_chat, generator)
            for number, line in enumerate(lines, 1)
        ]
    if not samples:
        raise ConfigError(f"{_FLAG} {path} is empty")
    order = generator.permutation(len(samples)).tolist()
    return [samples[order[index % len(order)]] for index in range(count)]


def read_file(path: Path, flag: str) -> bytes:
    """Read a whole file. Raises ConfigError, naming its flag, if it cannot be read or is larger than 4 GiB."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{flag} {path} is larger than {MAX_FILE_BYTES >> 30} GiB; cut it")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error


def _parse_line(
    where: str, line: bytes, outputs: LengthRange | None, is_chat: bool, generator: np.random.Generator
) -> SampleRequest:
    try:
        entry = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: {error}") from error
    length = entry.output_tokens
    if length is None:
        length = (outputs or DEFAULT_OUTPUT).draw(generator)
    if length < 1:
        raise ConfigError(f"{where}: output_tokens must be at least 1")
    if is_chat and entry.messages is None and entry.prompt is not None:
        return SampleRequest([{"role": "user", "content": entry.prompt}], length)
    prompt: Prompt | None = entry.messages if is_chat else entry.prompt
    if not prompt:
        needed = "prompt or messages" if is_chat else "prompt"
        raise ConfigError(f"{where}: {needed} is needed for this --backend")
    return SampleRequest(prompt, length)


def _parse_sharegpt(
    path: Path, data: bytes, outputs: LengthRange | None, is_chat: bool, generator: np.random.Generator
) -> Iterator[SampleRequest]:
    """Yield a request for each entry that begins with a question and an answer to it; such files contain others."""
    try:
        entries = msgspec.json.decode(data, type=list[_Conversation])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{_FLAG} {path} is no ShareGPT dataset: {error}") from error
    for entry in entries:
        messages, answer = _split_first_answer(entry.conversations)
        if not messages or not answer:
            continue
        estimated = max(1, len(answer) // CHARACTERS_PER_TOKEN)
        length = estimated if outputs is None else outputs.draw(generator)
        yield SampleRequest(messages if is_chat else messages[-1]["content"], length)


def _split_first_answer(turns: Sequence[_Turn]) -> tuple[Messages, str]:
    """Return the messages before the first answer, and that answer; both are empty if there is no such pair."""
    messages: Messages = []
    for turn in turns:
        role = _ROLES.get(turn.role)
        if role == "assistant":
            follows_question = (
                bool(messages) and messages[-1]["role"] == "user" and bool(messages[-1]["content"])
            )
            return (messages, turn.value) if follows_question else ([], "")
        if role is not None:
            messages.append({"role": role, "content": turn.value})
    return [], ""
