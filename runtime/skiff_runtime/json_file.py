"""JSON files: bounded reading, and typed fields with errors that name the file and the key."""

import json
import sys
from pathlib import Path
from typing import Any, Final

from skiff_runtime.errors import ModelError

MAX_JSON_BYTES: Final = 64 << 20
MAX_COUNT: Final = (1 << 31) - 1
"""The largest count or size that a file may name; code that loops over one sets a lower limit."""
MAX_NUMBER: Final = sys.float_info.max
"""Larger whole numbers, and infinity, are refused: they are no finite float."""


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in ``path``. Raises ``ModelError`` if it is missing, too large or malformed."""
    value = _read_value(path, max_bytes)
    if not isinstance(value, dict):
        raise ModelError(f"{path} must contain a JSON object, not {type(value).__name__}")
    return value


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read the list of JSON objects in ``path``. Raises ``ModelError`` as ``read_json`` does."""
    value = _read_value(path, MAX_JSON_BYTES)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise ModelError(f"{path} must contain a list of JSON objects")
    return value


def _read_value(path: Path, max_bytes: int) -> Any:
    try:
        if path.stat().st_size > max_bytes:
            raise ModelError(f"{path} is larger than {max_bytes >> 20} MiB; this is no model's {path.name}")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    except RecursionError:
        raise ModelError(f"{path} is not valid JSON: it is nested too deeply") from None


class JsonObject:
    """Typed access to the fields of one JSON object. A null counts as absent; a wrong type raises ``ModelError``."""

    def __init__(self, source: str, values: dict[str, Any]) -> None:
        self.source = source
        self._values = values

    def has(self, key: str) -> bool:
        """Return whether the key is present, even with a null."""
        return key in self._values

    def list_keys(self) -> list[str]:
        """Return all keys, in the order of the file."""
        return list(self._values)

    def get(self, key: str) -> Any:
        """Return the raw value, or None."""
        return self._values.get(key)

    def positive(self, key: str, default: int | None = None, *, limit: int = MAX_COUNT) -> int:
        """Return a whole number from 1 to ``limit``; without a default it is required."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source} lacks {key!r}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.source}: {key!r} must be a positive whole number, not {value!r}")
        if value > limit:
            raise ModelError(f"{self.source}: {key!r} must be at most {limit}, not {value}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a finite number; without a default it is required."""
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise ModelError(f"{self.source} lacks {key!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_NUMBER:
            raise ModelError(f"{self.source}: {key!r} must be a number, not {value!r}")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ModelError(f"{self.source}: {key!r} must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str) -> str:
        """Return a string."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ModelError(f"{self.source}: {key!r} must be a string, not {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Return one token id or a list of them as a tuple; an absent key gives an empty one."""
        value = self._values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise ModelError(f"{self.source}: {key!r} must be a token id or a list of them, not {value!r}")
        return tuple(ids)

    def object(self, key: str) -> "JsonObject | None":
        """Return a nested object, or None."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ModelError(f"{self.source}: {key!r} must be an object, not {value!r}")
        return JsonObject(f"{self.source}: {key}", value)
