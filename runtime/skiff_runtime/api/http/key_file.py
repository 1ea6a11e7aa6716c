"""Key files: files of API keys that are read again while the service runs, so that rotation needs no restart.

The file is polled instead of watched: a Secret volume of Kubernetes changes by the swap of a symbolic link to its
folder, which a watch of the file itself does not report, and a poll costs one ``stat``.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Final

from skiff_runtime import log
from skiff_runtime.config.api_keys import KeyRing, read_api_keys
from skiff_runtime.errors import ConfigError

POLL_SECONDS: Final = 1.0


class KeyFile:
    """One file of keys, and the key ring that accepts them beside the keys of flags and variables.

    A file that cannot be used leaves the ring as it is: an empty one must not open the service, nor a broken one lock
    every client out.
    """

    def __init__(self, path: str, flag: str, *, given: tuple[str, ...]) -> None:
        """Read the file for the first time. ``given``: keys that do not come from the file.

        Raises:
            ConfigError: the file cannot be read, contains no key, or contains a malformed one.
        """
        self.path = path
        self.flag = flag
        self._given = given
        self._failure = ""
        self._version: tuple[int, int, int] | None = None
        self._keys = self._read() or {}
        self.ring = KeyRing((*given, *self._keys))

    async def watch(self, on_reload: Callable[[bool], None]) -> None:
        """Read the file again whenever it changes; pass to ``on_reload`` whether its keys are in force."""
        on_reload(True)
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self._refresh(on_reload)

    async def _refresh(self, on_reload: Callable[[bool], None]) -> None:
        try:
            # A thread, because a file on a network volume may take long.
            keys = await asyncio.to_thread(self._read)
        except ConfigError as error:
            self._version = None  # tried again until it can be used
            if str(error) != self._failure:
                self._failure = str(error)
                log.error("api_keys_not_reloaded", reason=self._failure, kept=len(self._keys))
                on_reload(False)
            return
        if keys is None:
            return
        added, removed = keys.keys() - self._keys.keys(), self._keys.keys() - keys.keys()
        log.event(
            "api_keys_reloaded",
            file=self.path,
            keys=len(keys),
            added=_describe([keys[key] for key in added]),
            removed=_describe([self._keys[key] for key in removed]),
        )
        self._keys, self._failure = keys, ""
        self.ring.replace((*self._given, *keys))
        on_reload(True)

    def _read(self) -> dict[str, str] | None:
        """Return the keys and their names; None if the file has not changed since it was last read."""
        try:
            status = Path(self.path).stat()
        except OSError as error:
            raise ConfigError(f"{self.flag} {self.path} cannot be read: {error}") from None
        version = (status.st_ino, status.st_mtime_ns, status.st_size)
        if version == self._version:
            return None
        keys = read_api_keys(self.path, self.flag)
        # The version from before the read: a change in between is read again.
        self._version = version
        return keys


def _describe(names: list[str]) -> str:
    """Return the names of keys, and the number of those that have none."""
    unnamed = names.count("")
    words = sorted(name for name in names if name)
    return ", ".join([*words, *([f"{unnamed} unnamed"] if unnamed else [])]) or "none"
