"""Running other programs: with their output in a log, an error that shows its end, and progress for who waits."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

LOG_TAIL_LINES = 15


class ClusterError(Exception):
    """A failure with its remedy, as a message for the terminal."""


def say(text: str) -> None:
    """Print one line for the person who waits; stdout is kept for answers."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Print `title` when the block starts and the seconds it took when it ends, on one line."""
    print(f"{title} ...", end="", file=sys.stderr, flush=True)
    started = time.monotonic()
    try:
        yield
    except BaseException:
        say(" failed")
        raise
    say(f" {time.monotonic() - started:.1f} s")


def tail(log: Path, lines: int = LOG_TAIL_LINES) -> str:
    """Return the last lines of a log file, or a note that there is none."""
    if not log.exists():
        return "(no output)"
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def run(
    argv: Sequence[str | Path],
    *,
    log: Path,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_seconds: float = 3600,
) -> None:
    """Run a program with all of its output in `log`; `env` is added to this process's environment.

    Raises ClusterError with the log's end when it fails or takes longer than `timeout_seconds`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in argv]
    with log.open("wb") as out:
        try:
            code = subprocess.run(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=cwd,
                env={**os.environ, **(env or {})},
                timeout=timeout_seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            raise ClusterError(
                f"{words[0]} took longer than {timeout_seconds:.0f} s; its output is in {log}"
            ) from None
    if code != 0:
        raise ClusterError(f"`{' '.join(words)}` ended with {code}:\n{tail(log)}\n(all of it: {log})")


def output(argv: Sequence[str | Path], *, cwd: Path | None = None, timeout_seconds: float = 60) -> str:
    """Run a program and return its stdout without the last newline; raises ClusterError when it fails."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            cwd=cwd,
            timeout=timeout_seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"`{' '.join(words)}`: {error}") from error
    if done.returncode != 0:
        raise ClusterError(f"`{' '.join(words)}` ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout.rstrip("\n")


def succeeds(argv: Sequence[str | Path], *, timeout_seconds: float = 15) -> bool:
    """Say whether a program exists and ends with 0 in time; its output is dropped."""
    try:
        output(argv, timeout_seconds=timeout_seconds)
    except ClusterError:
        return False
    return True


def wait_for(
    what: str, condition: Callable[[], bool], *, timeout_seconds: float, interval_seconds: float = 0.1
) -> None:
    """Poll until `condition` holds; raises ClusterError naming `what` when the time is over."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > deadline:
            raise ClusterError(f"{what}: not within {timeout_seconds:.0f} s")
        time.sleep(interval_seconds)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, waiting for another command that holds it; it ends with the process at the latest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("waiting for another command that builds or changes the test cluster ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Give a folder for large files that goes with the block, and remove those that killed commands left.

    The caller holds a lock that keeps others from using `parent`.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for stale in parent.glob(".scratch-*"):
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".scratch-") as folder:
        yield Path(folder)
