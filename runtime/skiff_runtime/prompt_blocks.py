"""Prompt blocks: the beginnings of a prompt's text by which a router finds the replica that has its prefix in the KV cache.

A prompt is the JSON text of those fields of a body that the model reads. It is cut into blocks of ``PROMPT_BLOCK_BYTES``,
and each block is named by a hash of the text up to its end, so that equal names mean equal beginnings. A router and a pod
compute the same names of the same body, without a tokenizer: see docs/decisions/0041-prefix-routing.md.
"""

import hashlib
import struct
from typing import Final

import msgspec

PROMPT_BLOCK_BYTES: Final = 1024
MAX_PROMPT_BLOCKS: Final = 1024
"""Blocks of a prompt that are named; a longer prompt is known by its first MiB."""
HASH_DTYPE: Final = "<u8"
"""Of a name of a block, for numpy, which the router does without."""
_HASH_BYTES: Final = 8
DEFAULT_BYTES_PER_TOKEN: Final = 4.0
"""Of a prompt's JSON text, until pods have counted."""
_NONE: Final = msgspec.Raw(b"")


class PromptFields(msgspec.Struct):
    """The fields of a body that hold its prompt, as JSON text, in the order in which templates render them."""

    tools: msgspec.Raw = _NONE
    system: msgspec.Raw = _NONE
    instructions: msgspec.Raw = _NONE
    messages: msgspec.Raw = _NONE
    input: msgspec.Raw = _NONE
    prompt: msgspec.Raw = _NONE
    text: msgspec.Raw = _NONE
    input_ids: msgspec.Raw = _NONE
    cache_salt: msgspec.Raw = _NONE

    def prompt_text(self) -> bytes:
        """Return the text of the prompt: the JSON of its fields, one after the other."""
        return b"".join(
            (
                self.tools,
                self.system,
                self.instructions,
                self.messages,
                self.input,
                self.prompt,
                self.text,
                self.input_ids,
            )
        )

    def salt(self) -> str | None:
        """Return the ``cache_salt``, or None without one or if it is not a string, which the pod refuses."""
        try:
            return msgspec.json.decode(self.cache_salt, type=str | None) if self.cache_salt else None
        except msgspec.DecodeError:
            return None


class PromptBlocks(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of one prompt. ``hashes``: bytes of ``HASH_DTYPE``; ``text_bytes``: length of the prompt's text."""

    hashes: bytes
    text_bytes: int

    def names(self) -> list[int]:
        """Return the hashes as numbers."""
        return list(struct.unpack(f"<{len(self.hashes) // _HASH_BYTES}Q", self.hashes))


def adapter_namespace(namespace: bytes, adapter: str) -> bytes:
    """Return the namespace of the prompts of a LoRA adapter inside ``namespace``; "" is the base model."""
    return b"%b\0adapter:%b" % (namespace, adapter.encode()) if adapter else namespace


def hash_prompt(text: bytes, namespace: bytes) -> PromptBlocks:
    """Return the whole blocks of a prompt.

    ``namespace``: that of the prefix cache, b"" for the common one; equal texts of two namespaces have different names.
    """
    whole = min(len(text) // PROMPT_BLOCK_BYTES, MAX_PROMPT_BLOCKS)
    state = hashlib.sha256(namespace)
    view = memoryview(text)
    hashes = []
    for start in range(0, whole * PROMPT_BLOCK_BYTES, PROMPT_BLOCK_BYTES):
        state.update(view[start : start + PROMPT_BLOCK_BYTES])
        hashes.append(state.digest()[:_HASH_BYTES])
    return PromptBlocks(b"".join(hashes), len(text))


_DECODER: Final = msgspec.json.Decoder(PromptFields)


def hash_body(body: bytes, namespace: bytes) -> PromptBlocks | None:
    """Return the blocks of the prompt in a JSON body; None if it is no JSON by the standard, which a pod may accept."""
    try:
        return hash_prompt(_DECODER.decode(body).prompt_text(), namespace)
    except (msgspec.DecodeError, RecursionError):
        return None
