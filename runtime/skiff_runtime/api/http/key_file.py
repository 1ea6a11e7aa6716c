"""Key files: files of API keys that are read again while the service runs, so that rotation needs no restart."""

from collections.abc import Callable

from skiff_runtime import log
from skiff_runtime.api.http.reloaded_file import ReloadedFile
from skiff_runtime.config.api_keys import KeyRing, hash_key, read_api_keys
from skiff_runtime.errors import ConfigError


class KeyFile:
    """One file of keys, and the key ring that accepts them beside the keys of flags and variables.

    A file that cannot be used leaves the ring as it is: an empty one must not open the service, nor a broken one lock
    every client out.
    """

    def __init__(
        self, path: str, flag: str, *, given: tuple[str, ...], digests: tuple[str, ...] = ()
    ) -> None:
        """Read the file for the first time. ``given``: keys that do not come from the file; ``digests``: of such keys.

        Raises:
            ConfigError: the file cannot be read, contains no key, or contains a malformed one.
        """
        self.flag = flag
        self._given = given
        self._file = ReloadedFile(path, flag, read_api_keys)
        self.ring = KeyRing((*given, *self._file.value), digests)
        self._names = _names_by_digest(self._file.value)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the file's keys; that of a key without a name is ""."""
        return frozenset(self._names.values())

    def find_name(self, digest: bytes) -> str:
        """Return the name of the key with this digest, "" if it has none or is no longer in the file."""
        return self._names.get(digest, "")

    async def watch(self, on_reload: Callable[[bool], None]) -> None:
        """Read the file again whenever it changes; pass to ``on_reload`` whether its keys are in force."""

        def take(before: dict[str, str]) -> None:
            keys = self._file.value
            added, removed = keys.keys() - before.keys(), before.keys() - keys.keys()
            log.event(
                "api_keys_reloaded",
                file=self._file.path,
                keys=len(keys),
                added=_describe([keys[key] for key in added]),
                removed=_describe([before[key] for key in removed]),
            )
            self.ring.replace((*self._given, *keys))
            self._names = _names_by_digest(keys)
            on_reload(True)

        def report(error: ConfigError) -> None:
            log.error("api_keys_not_reloaded", reason=error, kept=len(self._file.value))
            on_reload(False)

        on_reload(True)
        await self._file.watch(on_change=take, on_failure=report)


def _names_by_digest(keys: dict[str, str]) -> dict[bytes, str]:
    return {hash_key(key.encode()): name for key, name in keys.items()}


def _describe(names: list[str]) -> str:
    """Return the names of keys, and the number of those that have none."""
    unnamed = names.count("")
    words = sorted(name for name in names if name)
    return ", ".join([*words, *([f"{unnamed} unnamed"] if unnamed else [])]) or "none"
