"""Namespaces of the prefix cache: a client's salt and a LoRA adapter together make the salt of a sequence.

Each adapter computes other keys and values of the same tokens, so sequences share pages only with those of the same adapter,
and only while it is the same load of it: names are used again, ids never are.
"""

import hashlib
from typing import Final, NamedTuple

_MARK: Final = hashlib.sha256(b"skiff LoRA adapter").digest()[:16]
"""Begins the salts of adapters. A client's salt is a digest, so it does not."""
_ID_BYTES: Final = 8
_LENGTH_BYTES: Final = 2
_HEAD_BYTES: Final = len(_MARK) + _ID_BYTES + _LENGTH_BYTES


class CacheNamespace(NamedTuple):
    """The parts of a salt. ``adapter_id`` 0 and ``adapter_name`` "" stand for the base model."""

    client_salt: bytes = b""
    adapter_id: int = 0
    adapter_name: str = ""

    def encode(self) -> bytes:
        """Return the salt under which a prefix cache keeps the sequences of this namespace."""
        if not self.adapter_id:
            return self.client_salt
        name = self.adapter_name.encode()
        number, length = self.adapter_id.to_bytes(_ID_BYTES), len(name).to_bytes(_LENGTH_BYTES)
        return _MARK + number + length + name + self.client_salt

    @staticmethod
    def decode(salt: bytes) -> "CacheNamespace":
        """Return the parts of a salt that ``encode`` has made."""
        if not salt.startswith(_MARK):
            return CacheNamespace(salt)
        number_end = len(_MARK) + _ID_BYTES
        name_end = _HEAD_BYTES + int.from_bytes(salt[number_end:_HEAD_BYTES])
        return CacheNamespace(
            client_salt=salt[name_end:],
            adapter_id=int.from_bytes(salt[len(_MARK) : number_end]),
            adapter_name=salt[_HEAD_BYTES:name_end].decode(),
        )

    def hash_salt(self) -> bytes:
        """Return the salt of the names of KV blocks, which are equal on all pods that serve an adapter of the same name."""
        return self.adapter_name.encode() + b"\0" + self.client_salt if self.adapter_id else self.client_salt
