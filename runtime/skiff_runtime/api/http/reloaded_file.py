"""A file that is read again while the process runs, so that its change needs no restart.

The file is polled instead of watched: a Secret or ConfigMap volume of Kubernetes changes by the swap of a symbolic link to
its folder, which a watch of the file itself does not report, and a poll costs one ``stat``.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from skiff_runtime.errors import ConfigError

POLL_SECONDS: Final = 1.0
ValueT = TypeVar("ValueT")


class ReloadedFile(Generic[ValueT]):
    """One file and its value. A file that cannot be used leaves the value as it is."""

    def __init__(self, path: str, flag: str, read: Callable[[str, str], ValueT]) -> None:
        """Read the file for the first time. ``read`` gets ``path``, and ``flag`` for its errors.

        Raises:
            ConfigError: ``read`` raised it, or there is no file.
        """
        self.path = path
        self.flag = flag
        self._read_file = read
        self._failure = ""
        self._version = self._find_version()
        self.value = read(path, flag)

    async def watch(
        self, *, on_change: Callable[[ValueT], None], on_failure: Callable[[ConfigError], None]
    ) -> None:
        """Read the file again whenever it changes: ``on_change`` gets the value before, ``on_failure`` each new error."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            try:
                # A thread, because a file on a network volume may take long.
                changed = await asyncio.to_thread(self._read)
            except ConfigError as error:
                self._version = None  # tried again until it can be used
                if str(error) != self._failure:
                    self._failure = str(error)
                    on_failure(error)
                continue
            if changed is not None:
                before, self.value, self._failure = self.value, changed, ""
                on_change(before)

    def _read(self) -> ValueT | None:
        """Return the value; None if the file has not changed since it was last read."""
        version = self._find_version()
        if version == self._version:
            return None
        value = self._read_file(self.path, self.flag)
        # The version from before the read: a change in between is read again.
        self._version = version
        return value

    def _find_version(self) -> tuple[int, int, int] | None:
        try:
            status = Path(self.path).stat()
        except OSError as error:
            raise ConfigError(f"{self.flag} {self.path} cannot be read: {error}") from None
        return status.st_ino, status.st_mtime_ns, status.st_size
