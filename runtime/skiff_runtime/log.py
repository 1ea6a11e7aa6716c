"""Structured logs: one line of key=value fields for each event, in the same form from every process.

``event("request_failed", uid=7, reason="...")`` becomes
``2026-01-02T03:04:05.678Z info rank0 request_failed uid=7 reason="..."``.
"""

import contextlib
import json
import logging
import sys
import time
from typing import Final

from skiff_runtime.batch_writer import BatchWriter

_LOGGER: Final = logging.getLogger("skiff")


class _Clock:
    """Formats times in UTC, with milliseconds; the seconds are formatted once."""

    def __init__(self) -> None:
        self._latest = (-1, "")
        """The last second and its text; one attribute, because several threads may log."""

    def __call__(self, seconds: float) -> str:
        whole = int(seconds)
        second, text = self._latest
        if whole != second:
            text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
            self._latest = (whole, text)
        return f"{text}.{int((seconds - whole) * 1000):03d}Z"


format_time: Final = _Clock()
"""Return seconds since 1970 as ``2026-01-02T03:04:05.678Z``."""


class _Line(logging.Formatter):
    """Formats a record as ``time level process message``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        text = self.line(record.created, record.levelname.lower(), record.getMessage())
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text

    def line(self, seconds: float, level: str, message: str) -> str:
        """Return the line of an event at ``seconds`` since 1970."""
        return f"{format_time(seconds)} {level} {self._process} {message}"


class _BatchHandler(logging.Handler):
    """Writes lines to stderr from a thread, many at a time; the last ones of a process that is killed may be lost."""

    def __init__(self, line: _Line) -> None:
        super().__init__()
        self.setFormatter(line)
        self._line = line
        self._writer: BatchWriter[str] = BatchWriter("log", self._write)
        self._reported = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._writer.put(self.format(record))

    def emit_event(self, message: str) -> None:
        """Write an ordinary event, without a record, which would cost several times as much as its line."""
        self._writer.put(self._line.line(time.time(), "info", message))

    def close(self) -> None:
        self._writer.close()
        super().close()

    def _write(self, lines: list[str]) -> None:
        dropped = self._writer.dropped - self._reported
        if dropped:
            self._reported += dropped
            message = _render(
                "log_lines_dropped", {"count": dropped, "reason": "stderr takes them too slowly"}
            )
            lines.append(self._line.line(time.time(), "warning", message))
        # If stderr is closed, there is no other place to report that.
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write("\n".join(lines) + "\n")
            sys.stderr.flush()


_batch_handler: _BatchHandler | None = None


def configure(process: str, level: str, *, batched: bool = False) -> None:
    """Write this process's events to stderr: each by its caller, or ``batched``, by a thread within 50 ms.

    Batches suit a process that logs an event for each request, and whose event loop must not wait for stderr.
    """
    global _batch_handler
    line = _Line(process)
    _batch_handler = _BatchHandler(line) if batched else None
    handler = _batch_handler or logging.StreamHandler(sys.stderr)
    handler.setFormatter(line)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    _LOGGER.setLevel(level.upper())


def _render(name: str, fields: dict[str, object]) -> str:
    return " ".join([name, *[f"{key}={_value(value)}" for key, value in fields.items()]])


def _value(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    plain = text.isprintable() and not (" " in text or '"' in text or "=" in text)
    return text if text and plain else json.dumps(text)


def debug(name: str, **fields: object) -> None:
    """Log an event that helps a developer."""
    if _LOGGER.isEnabledFor(logging.DEBUG):
        _LOGGER.debug("%s", _render(name, fields))


def event(name: str, **fields: object) -> None:
    """Log an ordinary event."""
    if not _LOGGER.isEnabledFor(logging.INFO):
        return
    if _batch_handler is not None:
        _batch_handler.emit_event(_render(name, fields))
    else:
        _LOGGER.info("%s", _render(name, fields))


def warning(name: str, **fields: object) -> None:
    """Log an event that an operator should look into."""
    _LOGGER.warning("%s", _render(name, fields))


def error(name: str, *, exc_info: bool = False, **fields: object) -> None:
    """Log a failure; with ``exc_info`` the current exception's traceback follows."""
    _LOGGER.error("%s", _render(name, fields), exc_info=exc_info)
