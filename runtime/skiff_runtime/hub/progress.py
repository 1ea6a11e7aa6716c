"""How a download tells how far it is: bars in a terminal, a log line every few seconds elsewhere."""

import sys
import time
from collections.abc import Sequence
from typing import Final, Protocol

import rich.console
import rich.progress

from skiff_runtime import log
from skiff_runtime.hub.listing import RemoteFile

REPORT_SECONDS: Final = 5.0


class Progress(Protocol):
    """What a download reports to. ``update`` is called from several threads, the rest from one."""

    def begin(self, files: Sequence[RemoteFile]) -> None:
        """These files join the download."""

    def update(self, name: str, received_bytes: int) -> None:
        """So much of a file is here; less than before when it had to start again."""

    def tick(self) -> None:
        """Called about twice a second."""

    def close(self) -> None:
        """The download has ended, well or not."""


class LogProgress:
    """Logs the sum over all files."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._received: dict[str, int] = {}
        self._reported_at = time.monotonic()
        self._reported_bytes = 0

    def begin(self, files: Sequence[RemoteFile]) -> None:
        self._sizes.update({file.name: file.size_bytes for file in files})

    def update(self, name: str, received_bytes: int) -> None:
        self._received[name] = received_bytes

    def tick(self) -> None:
        if time.monotonic() - self._reported_at >= REPORT_SECONDS:
            self._report()

    def close(self) -> None:
        if self._sizes:
            self._report()

    def _report(self) -> None:
        now, received, total = time.monotonic(), sum(list(self._received.values())), sum(self._sizes.values())
        rate = max(0, received - self._reported_bytes) / max(now - self._reported_at, 1e-3)
        self._reported_at, self._reported_bytes = now, received
        log.event(
            "fetch_progress",
            percent=f"{100 * received / total if total else 100:.1f}",
            received_mb=f"{received / 1e6:.1f}",
            total_mb=f"{total / 1e6:.1f}",
            mb_per_second=f"{rate / 1e6:.1f}",
        )


class BarProgress:
    """Draws one bar a file on stderr."""

    def __init__(self) -> None:
        self._bars = rich.progress.Progress(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.DownloadColumn(),
            rich.progress.TransferSpeedColumn(),
            rich.progress.TimeRemainingColumn(),
            console=rich.console.Console(stderr=True),
        )
        self._tasks: dict[str, rich.progress.TaskID] = {}
        self._bars.start()

    def begin(self, files: Sequence[RemoteFile]) -> None:
        for file in files:
            self._tasks[file.name] = self._bars.add_task(file.name, total=file.size_bytes)

    def update(self, name: str, received_bytes: int) -> None:
        self._bars.update(self._tasks[name], completed=received_bytes)

    def tick(self) -> None:
        """Nothing to do: the bars draw themselves."""

    def close(self) -> None:
        self._bars.stop()


def choose_progress() -> Progress:
    """Bars where stderr is a terminal, else log lines."""
    return BarProgress() if sys.stderr.isatty() else LogProgress()
