"""Progress of long work: a bar in a terminal, a log line every few seconds elsewhere."""

import sys
import time
from types import TracebackType
from typing import Final, Self

import rich.console
import rich.progress

from skiff_runtime import log

REPORT_SECONDS: Final = 5.0


class ProgressBar:
    """Counts the finished part of ``total`` (requests or tokens), failures, and tokens."""

    def __init__(self, title: str, total: int) -> None:
        self._title = title
        self._total = total
        self._done = 0
        self._failed = 0
        self._tokens = 0
        self._started = self._reported = time.monotonic()
        self._bar = _bar() if sys.stderr.isatty() else None
        self._task = self._bar.add_task(title, total=total, note="") if self._bar else None

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, *, done: int = 1, tokens: int = 0, failed: bool = False) -> None:
        """Add to the counts, and show them."""
        self._done += done
        self._tokens += tokens
        self._failed += failed
        if self._bar is not None and self._task is not None:
            note = f"{self._rate():,.0f} tok/s" + (f", {self._failed} failed" if self._failed else "")
            self._bar.update(self._task, completed=self._done, note=note)
        elif time.monotonic() - self._reported >= REPORT_SECONDS:
            self._report()

    def _rate(self) -> float:
        return self._tokens / max(time.monotonic() - self._started, 1e-3)

    def _report(self) -> None:
        self._reported = time.monotonic()
        log.event(
            "progress",
            work=self._title,
            done=self._done,
            total=self._total,
            failed=self._failed,
            tokens_per_second=f"{self._rate():.0f}",
        )


def _bar() -> rich.progress.Progress:
    return rich.progress.Progress(
        rich.progress.TextColumn("{task.description}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TimeElapsedColumn(),
        rich.progress.TextColumn("{task.fields[note]}"),
        console=rich.console.Console(stderr=True),
    )
