"""Progress of a download: a log line every few seconds, and the present state for those who observe the process."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple

from skiff_runtime import log

REPORT_SECONDS: Final = 5.0


class Progress(NamedTuple):
    """Bytes of the files that are being downloaded: configuration first, then weights."""

    received_bytes: int
    total_bytes: int


class _Running:
    """The download of this process; there is one at a time."""

    observe: Callable[[], Progress] | None = None


def current_progress() -> Progress | None:
    """Return the progress of the running download; None if there is none."""
    observe = _Running.observe
    return None if observe is None else observe()


@contextmanager
def report_progress(
    total_bytes: int, received_bytes: Callable[[], int], *, on_terminal: bool = False
) -> Iterator[None]:
    """Log the progress while the block runs and at its end.

    ``received_bytes`` counts bytes on the disk, which are the same for HTTP and for Xet. ``on_terminal``: also on a
    terminal, where otherwise the library's progress bars take its place.
    """
    ended = threading.Event()
    _Running.observe = lambda: Progress(min(received_bytes(), total_bytes), total_bytes)

    def run() -> None:
        last_time, last_bytes = time.monotonic(), received_bytes()
        is_last = False
        while not is_last:
            is_last = ended.wait(REPORT_SECONDS)
            now, received = time.monotonic(), min(received_bytes(), total_bytes)
            log.event(
                "fetch_progress",
                percent=f"{100 * received / total_bytes if total_bytes else 100:.1f}",
                received_mb=f"{received / 1e6:.1f}",
                total_mb=f"{total_bytes / 1e6:.1f}",
                mb_per_second=f"{max(0, received - last_bytes) / max(now - last_time, 1e-3) / 1e6:.1f}",
            )
            last_time, last_bytes = now, received

    reporter = threading.Thread(target=run, name="fetch-progress", daemon=True)
    if on_terminal or not sys.stderr.isatty():
        reporter.start()
    try:
        yield
    finally:
        _Running.observe = None
        ended.set()
        if reporter.is_alive():
            reporter.join()
