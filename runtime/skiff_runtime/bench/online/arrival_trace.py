"""Traces of recorded traffic: the arrival time and the lengths of each request, without its text."""

import csv
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import msgspec

from skiff_runtime.bench.online.dataset import read_file
from skiff_runtime.errors import ConfigError

UNITS: Final = {"s": 1.0, "ms": 1e-3}
MAX_LENGTH: Final = 10_000_000
_NAMES: Final[dict[str, tuple[str, ...]]] = {
    "timestamp": ("timestamp", "arrived_at", "arrival_time"),
    "input_length": ("input_length", "input_tokens", "contexttokens", "request_tokens", "num_prefill_tokens"),
    "output_length": (
        "output_length",
        "output_tokens",
        "generatedtokens",
        "response_tokens",
        "num_decode_tokens",
    ),
}
"""Names of the three columns in published traces, in lower case and with underscores for blanks."""
BLOCKS: Final = "hash_ids"
"""The optional list of a JSON line that numbers the blocks of its prompt; equal blocks have equal numbers."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A recorded request. ``at_seconds`` is the time after the first one.

    ``block_ids`` numbers the blocks of the prompt, all of one size; equal blocks have equal numbers. Empty if the trace has none.
    """

    at_seconds: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


def read_trace(path: Path, unit: str) -> list[Arrival]:
    """Read the requests of a ``.csv`` file with a header line, or of JSON lines, sorted by time.

    Each has a timestamp (a number in ``unit``, or a date and time of ISO 8601), an input length and an output length
    in tokens, under any of the names that published traces use, and may have ``hash_ids``. Requests without output are
    skipped, for they have failed.

    Raises:
        ConfigError: the file is malformed; the message names the line.
    """
    data = read_file(path, "--dataset-path")
    rows = _read_csv(path, data) if path.suffix.lower() == ".csv" else _read_json(path, data)
    found = [_parse_arrival(f"--dataset-path {path}, line {line}", row, UNITS[unit]) for line, row in rows]
    kept = sorted((each for each in found if each.output_tokens > 0), key=lambda each: each.at_seconds)
    if not kept:
        raise ConfigError(f"--dataset-path {path} holds no request")
    first = kept[0].at_seconds
    return [replace(each, at_seconds=each.at_seconds - first) for each in kept]


def scale_to_rate(arrivals: list[float], per_second: float) -> list[float]:
    """Scale arrival times to a mean rate of ``per_second``; all become 0 for ``inf``."""
    span = arrivals[-1]
    if span == 0:
        return [0.0] * len(arrivals)
    factor = (len(arrivals) - 1) / per_second / span
    return [each * factor for each in arrivals]


def _read_csv(path: Path, data: bytes) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        text = data.decode("utf-8-sig")  # spreadsheets begin such files with a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"--dataset-path {path} is not UTF-8 text: {error}") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise ConfigError(f"--dataset-path {path}, line {reader.line_num}: {error}") from error


def _read_json(path: Path, data: bytes) -> Iterator[tuple[int, Mapping[str, Any]]]:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip():
            try:
                yield number, decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"--dataset-path {path}, line {number}: {error}") from error


def _parse_arrival(where: str, row: Mapping[str, Any], unit_seconds: float) -> Arrival:
    named = {str(key).strip().lower().replace(" ", "_"): value for key, value in row.items()}
    found = {column: next((named[n] for n in names if n in named), None) for column, names in _NAMES.items()}
    for column, value in found.items():
        if value is None:
            raise ConfigError(f"{where}: {column!r} is missing; known names are {', '.join(_NAMES[column])}")
    return Arrival(
        _parse_timestamp(where, found["timestamp"], unit_seconds),
        _parse_length(where, "input_length", found["input_length"], 1),
        _parse_length(where, "output_length", found["output_length"], 0),
        _parse_blocks(where, named.get(BLOCKS, [])),
    )


def _parse_timestamp(where: str, value: Any, unit_seconds: float) -> float:
    try:
        moment = float(value) * unit_seconds
    except (TypeError, ValueError):
        try:
            read = datetime.fromisoformat(_cut_to_microseconds(str(value).strip()))
            moment = (read if read.tzinfo else read.replace(tzinfo=UTC)).timestamp()
        except ValueError:
            moment = float("nan")
    if not abs(moment) < float("inf"):  # NaN, too, is refused
        raise ConfigError(f"{where}: timestamp must be a number or an ISO 8601 date and time, not {value!r}")
    return moment


def _cut_to_microseconds(text: str) -> str:
    """Drop the digits after microseconds, which some traces have and ``fromisoformat`` rejects."""
    whole, dot, fraction = text.partition(".")
    digits = len(fraction) - len(fraction.lstrip("0123456789"))
    return whole + dot + fraction[: min(6, digits)] + fraction[digits:]


def _parse_blocks(where: str, value: Any) -> tuple[int, ...]:
    try:
        return msgspec.convert(value, tuple[int, ...])
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {BLOCKS} must be a list of whole numbers: {error}") from error


def _parse_length(where: str, name: str, value: Any, least: int) -> int:
    try:
        length = int(value) if float(value).is_integer() else -1
    except (TypeError, ValueError, OverflowError):
        length = -1
    if not least <= length <= MAX_LENGTH:
        raise ConfigError(
            f"{where}: {name} must be a whole number from {least} to {MAX_LENGTH}, not {value!r}"
        )
    return length
