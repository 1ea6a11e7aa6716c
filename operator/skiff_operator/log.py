"""Structured logs: one JSON object a line on stderr, extra fields beside the message."""

import datetime
import logging
import sys
from typing import Final

import msgspec

logger: Final = logging.getLogger("skiff_operator")

_STANDARD: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **{key: str(value) for key, value in vars(record).items() if key not in _STANDARD},
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def configure(level: str) -> None:
    """Log from `level` on; kopf logs warnings only, because the rest repeats our own events."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logger.setLevel(level.upper())
