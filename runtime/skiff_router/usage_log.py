"""The usage log: one line of JSON for each request, for billing.

A thread writes the lines, because a full pipe or a slow volume would otherwise stop every stream. Lines that it cannot write
in time are counted and dropped: the router's memory is bounded.
"""

import os
import sys
from pathlib import Path
from typing import Final

import msgspec

from skiff_runtime import log
from skiff_runtime.batch_writer import BatchWriter
from skiff_runtime.errors import ConfigError

STDOUT: Final = "-"
_ENCODER: Final = msgspec.json.Encoder()


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """One request. ``key``: the name of its API key, never the key; None without keys. ``model`` and ``service`` are None
    for a request that was refused before they were known. ``time``: its end, in UTC. ``estimated``: the pod did not report
    the counts, as when the client left."""

    time: str
    id: str
    key: str | None
    model: str | None
    service: str | None
    endpoint: str
    status: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    estimated: bool


class UsageLog:
    """The file of lines, or the standard output. A file that was moved away, as by logrotate, is made anew."""

    def __init__(self, path: str, flag: str) -> None:
        """Open the file that ``flag`` names, ``STDOUT`` for the standard output.

        Raises:
            ConfigError: It cannot be written.
        """
        self._unwritten = 0
        self._path = None if path == STDOUT else Path(path)
        self._inode = 0
        try:
            self._descriptor = self._open()
        except OSError as error:
            raise ConfigError(f"{flag} {path} cannot be written: {error}") from None
        self._failed = False
        self._writer: BatchWriter[UsageLine] = BatchWriter("usage-log", self._write_lines)

    @property
    def lost(self) -> int:
        """Return the number of lines that were dropped, or could not be written."""
        return self._writer.dropped + self._unwritten  # each is counted by one thread

    def write(self, line: UsageLine) -> None:
        """Write a line, soon."""
        self._writer.put(line)

    def close(self) -> None:
        """Write the lines that wait, for a few seconds at most."""
        self._writer.close()

    def _write_lines(self, lines: list[UsageLine]) -> None:
        try:
            self._write(b"".join([_ENCODER.encode(line) + b"\n" for line in lines]))
            self._failed = False
        except OSError as error:
            self._unwritten += len(lines)
            if not self._failed:
                self._failed = True
                log.error("usage_log_not_written", reason=error)

    def _write(self, data: bytes) -> None:
        if self._path is not None and self._is_moved(self._path):
            before, self._descriptor = self._descriptor, self._open()
            os.close(before)
        view = memoryview(data)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def _is_moved(self, path: Path) -> bool:
        try:
            return path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def _open(self) -> int:
        if self._path is None:
            return os.dup(sys.stdout.fileno())
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        self._inode = os.fstat(descriptor).st_ino
        return descriptor
