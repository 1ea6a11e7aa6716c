"""A file lock (flock), so that a cache that several pods share has one writer."""

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from skiff_runtime import log
from skiff_runtime.contract import FLAG_DOWNLOAD_DIR
from skiff_runtime.errors import FetchError

WAIT_SECONDS: Final = 6 * 3600.0
_POLL_SECONDS: Final = 0.5
_REPORT_SECONDS: Final = 15.0
_UNSUPPORTED: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """Hold the lock of ``path``. The kernel releases it however this process ends.

    While another process holds it, wait and log that now and then. Raises ``FetchError`` after ``WAIT_SECONDS``, or if
    the file system supports no locks.
    """
    with path.open("w") as stream:
        deadline = time.monotonic() + WAIT_SECONDS
        report = time.monotonic()
        while not _try_lock(stream, path):
            now = time.monotonic()
            if now > deadline:
                raise FetchError(
                    f"another process has held {path} for {WAIT_SECONDS / 3600:.0f} hours; end it"
                )
            if now >= report:
                log.event("fetch_waiting", reason="another process is downloading this model", lock=path)
                report = now + _REPORT_SECONDS
            time.sleep(_POLL_SECONDS)
        yield


def _try_lock(stream: IO[str], path: Path) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            raise FetchError(
                f"the file system of {path} supports no locks ({error.strerror}); use another {FLAG_DOWNLOAD_DIR}"
            ) from error
        raise
    return True


def is_unlocked(path: Path) -> bool:
    """Return whether no process holds the lock of ``path``; a file that does not exist is unlocked."""
    try:
        with path.open("r+") as stream:
            return _try_lock(stream, path)
    except FileNotFoundError:
        return True
    except (OSError, FetchError):
        return False
