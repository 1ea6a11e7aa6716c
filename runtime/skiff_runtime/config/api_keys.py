"""API keys: their syntax, files of them, and a lookup in constant time."""

import hashlib
import hmac
import re
from pathlib import Path
from typing import Final

from skiff_runtime.errors import ConfigError

MAX_API_KEYS: Final = 256
MAX_FILE_BYTES: Final = 1 << 20
_KEY: Final = re.compile(r"[\x21-\x7e]{1,512}")


def check_api_keys(keys: tuple[str, ...], source: str) -> None:
    """Raise ConfigError unless every key can be sent in a header. The message contains none of the keys."""
    if len(keys) > MAX_API_KEYS:
        raise ConfigError(
            f"{source} has {len(keys)} keys, but each request is compared with all of them; "
            f"give at most {MAX_API_KEYS}"
        )
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{source}: key {number} must have 1 to 512 printable ASCII characters and no space"
            )


def read_api_keys(path: str | None, flag: str) -> tuple[str, ...]:
    """Return the keys in the file that ``flag`` names, one per line; no keys if ``path`` is None.

    Raises:
        ConfigError: the file cannot be read, contains no key, or contains a malformed one.
    """
    if path is None:
        return ()
    source = f"{flag} {path}"
    try:
        with Path(path).open(encoding="utf-8") as file:
            text = file.read(MAX_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from None
    lines = (line.strip() for line in text.splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{source} holds no key; remove the flag, or add a key to the file")
    check_api_keys(keys, source)
    return keys


class KeyRing:
    """SHA-256 digests of the keys that are accepted for one purpose."""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, key: bytes) -> bytes | None:
        """Return the digest of ``key`` if the ring contains it, else None."""
        given = _digest(key)
        found = False
        # Compares with every key, even after a match, so that the time reveals neither a match nor its position.
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return given if found else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
