"""API keys: their syntax, files of them, and a lookup in constant time."""

import hashlib
import hmac
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from skiff_runtime.errors import ConfigError

MAX_API_KEYS: Final = 256
MAX_FILE_BYTES: Final = 1 << 20
_KEY: Final = re.compile(r"[\x21-\x7e]{1,512}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_NAMED: Final = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9_.-]{0,62}):\s+(?P<key>\S.*)")


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


def check_key_digests(digests: tuple[str, ...], source: str) -> None:
    """Raise ConfigError unless every digest is a SHA-256 digest in lower-case hexadecimal digits."""
    if len(digests) > MAX_API_KEYS:
        raise ConfigError(f"{source} has {len(digests)} digests; give at most {MAX_API_KEYS}")
    for number, digest in enumerate(digests, 1):
        if not _DIGEST.fullmatch(digest):
            raise ConfigError(
                f"{source}: digest {number} must be the SHA-256 digest of a key, 64 hexadecimal digits in lower case"
            )


def read_api_keys(path: str, flag: str) -> dict[str, str]:
    """Return the keys in the file that ``flag`` names, each with its name, or "" if it has none.

    A line is ``KEY`` or ``NAME: KEY``; empty lines and those that begin with # are skipped.

    Raises:
        ConfigError: the file cannot be read, contains no key, or contains a malformed one.
    """
    source = f"{flag} {path}"
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} cannot be read: {error}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{source} has more than {MAX_FILE_BYTES} bytes; it must contain only keys")
    lines = [line.strip() for line in text.splitlines()]
    entries = [_parse_line(line) for line in lines if line and not line.startswith("#")]
    if not entries:
        raise ConfigError(f"{source} holds no key; remove the flag, or add a key to the file")
    check_api_keys(tuple(key for key, _ in entries), source)
    return dict(entries)


def _parse_line(line: str) -> tuple[str, str]:
    """Return the key of a line and its name. Keys contain no space, so ``a:b`` is a key and ``a: b`` has a name."""
    named = _NAMED.fullmatch(line)
    return (named["key"], named["name"]) if named else (line, "")


class KeyRing:
    """SHA-256 digests of the keys that are accepted for one purpose."""

    def __init__(self, keys: Iterable[str], digests: Iterable[str] = ()) -> None:
        """``digests``: in hexadecimal, of further keys, which are accepted for ever."""
        self._fixed = [bytes.fromhex(digest) for digest in digests]
        self.replace(keys)

    def replace(self, keys: Iterable[str]) -> None:
        """Accept these keys from now on, those of the fixed digests, and no others."""
        self._digests = [*self._fixed, *(hash_key(key.encode()) for key in keys)]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, key: bytes) -> bytes | None:
        """Return the digest of ``key`` if the ring contains it, else None."""
        given = hash_key(key)
        found = False
        # Compares with every key, even after a match, so that the time reveals neither a match nor its position.
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return given if found else None


def hash_key(key: bytes) -> bytes:
    """Return the SHA-256 digest of a key, by which it is known after its check."""
    return hashlib.sha256(key).digest()
