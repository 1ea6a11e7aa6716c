"""The split of a service's requests between a canary, the pods of a new revision, and the pods of the old one.

The operator publishes the canary in the status of the InferenceService. By weight, a request belongs to the canary if the
hash of its identity falls into the canary's share of all hashes. So routers agree without talking, a conversation stays
with one revision, and a larger weight only moves requests from the old revision to the new one. The revision is hashed, too:
another canary meets other conversations.
"""

import hashlib
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from skiff_router.request import RoutedBody
from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.api.http.request_headers import get_header

StickyBy = Literal["Conversation", "Key"]
_HASHES: Final = 1 << 64
_HEAD_BYTES: Final = 1024
"""Leading bytes that identify the conversation of a prompt without messages."""


@dataclass(frozen=True, slots=True)
class CanarySplit:
    """A canary: its revision, the names of its pods, and the requests that it gets.

    Those are the requests with the ``header``, a lower-case name and a value, where there is one, and else ``weight`` percent
    of all, by conversation or by API key.
    """

    revision: str
    pods: frozenset[str]
    weight: int
    header: tuple[bytes, bytes] | None = None
    sticky_by: StickyBy = "Conversation"

    def takes(self, headers: Headers, fields: RoutedBody, key: bytes) -> bool:
        """Return whether a request belongs to the canary. ``key``: its API key, b"" for none."""
        if self.header is not None:
            name, value = self.header
            return get_header(headers, name) == value
        identity = key if self.sticky_by == "Key" else identify_conversation(fields)
        digest = hashlib.blake2b(identity, digest_size=8, key=self.revision.encode()[:64]).digest()
        return int.from_bytes(digest, "big") * 100 < self.weight * _HASHES


class _Message(msgspec.Struct):
    role: str = ""


_MESSAGES: Final = msgspec.json.Decoder(list[msgspec.Raw])
_MESSAGE: Final = msgspec.json.Decoder(_Message)


def identify_conversation(fields: RoutedBody) -> bytes:
    """Return a key that all requests of one conversation share.

    It is the ``prompt_cache_key`` or ``user`` of the request, else the messages up to and including the first user message
    (a system prompt alone may be common to all users), else the first KiB of the prompt.
    """
    named = bytes(fields.prompt_cache_key) or bytes(fields.user)
    if named:
        return named
    turns = bytes(fields.messages) or bytes(fields.input)
    opening = _read_opening(turns) if turns.startswith(b"[") else turns[:_HEAD_BYTES]
    head = b"".join((fields.system, fields.instructions, opening))
    return head or fields.prompt_text()[:_HEAD_BYTES]


def _read_opening(turns: bytes) -> bytes:
    """Return the messages of a JSON list up to the first one of the user; what the pod will refuse, as it is."""
    opening: list[bytes] = []
    try:
        for each in _MESSAGES.decode(turns):
            opening.append(bytes(each))
            if _MESSAGE.decode(each).role == "user":
                break
    except (msgspec.DecodeError, RecursionError):
        return turns[:_HEAD_BYTES]
    return b"".join(opening)
