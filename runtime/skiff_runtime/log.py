"""Structured logs: one line of key=value fields for each event, in the same form from every process.

``event("request_failed", uid=7, reason="...")`` becomes
``2026-01-02T03:04:05.678Z info rank0 request_failed uid=7 reason="..."``.
"""

import json
import logging
import sys
import time
from typing import Final

_LOGGER: Final = logging.getLogger("skiff")


class _Line(logging.Formatter):
    """Formats a record as ``time level process message``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"{clock}.{int(record.msecs):03d}Z {record.levelname.lower()} {self._process}"
        text = f"{head} {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


def configure(process: str, level: str) -> None:
    """Write this process's events to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line(process))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _LOGGER.setLevel(level.upper())


def _render(name: str, fields: dict[str, object]) -> str:
    return " ".join([name, *(f"{key}={_value(value)}" for key, value in fields.items())])


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and not any(c in text for c in ' "=')
    return text if text and plain else json.dumps(text)


def debug(name: str, **fields: object) -> None:
    """Log an event that helps a developer."""
    if _LOGGER.isEnabledFor(logging.DEBUG):
        _LOGGER.debug("%s", _render(name, fields))


def event(name: str, **fields: object) -> None:
    """Log an ordinary event."""
    if _LOGGER.isEnabledFor(logging.INFO):
        _LOGGER.info("%s", _render(name, fields))


def warning(name: str, **fields: object) -> None:
    """Log an event that an operator should look into."""
    _LOGGER.warning("%s", _render(name, fields))


def error(name: str, *, exc_info: bool = False, **fields: object) -> None:
    """Log a failure; with ``exc_info`` the current exception's traceback follows."""
    _LOGGER.error("%s", _render(name, fields), exc_info=exc_info)
