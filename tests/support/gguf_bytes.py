"""The bytes of GGUF files, well-formed or not: what a writer library refuses to write."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

_FORMATS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 4, 5, 6, 7, 8, 9, 10
F32, Q8_0 = 0, 8


@dataclass
class Tensor:
    """An entry of the tensor table. ``dimensions`` are in GGUF's order, columns first."""

    name: str
    dimensions: Sequence[int]
    kind: int = F32
    offset: int = 0


@dataclass
class GgufBytes:
    """A file: version, metadata as (key, type, value), tensors, and data. The counts can be set to other numbers."""

    metadata: list[tuple[str, int, Any]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    num_tensors: int | None = None
    num_metadata: int | None = None
    alignment: int = 32

    def build(self) -> bytes:
        """Return the file's content."""
        counts = (
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(self.metadata) if self.num_metadata is None else self.num_metadata,
        )
        parts = [self.magic, struct.pack("<IQQ", self.version, *counts)]
        for key, kind, content in self.metadata:
            parts += [text(key), struct.pack("<I", kind), value(kind, content)]
        for tensor in self.tensors:
            parts += [text(tensor.name), struct.pack("<I", len(tensor.dimensions))]
            parts += [struct.pack("<Q", size) for size in tensor.dimensions]
            parts.append(struct.pack("<IQ", tensor.kind, tensor.offset))
        header = b"".join(parts)
        return header + bytes(-len(header) % self.alignment) + self.data


def text(content: str | bytes) -> bytes:
    """Return a string with its length before it."""
    encoded = content.encode() if isinstance(content, str) else content
    return struct.pack("<Q", len(encoded)) + encoded


def value(kind: int, content: Any) -> bytes:
    """Return a metadata value. An array is (type, elements), or (type, length, bytes); ``bytes`` are taken as they are."""
    if isinstance(content, bytes) and kind != STRING:
        return content
    if kind == STRING:
        return text(content)
    if kind == ARRAY:
        if len(content) == 3:
            return struct.pack("<IQ", *content[:2]) + bytes(content[2])
        element, elements = content
        return struct.pack("<IQ", element, len(elements)) + b"".join(
            value(element, each) for each in elements
        )
    return struct.pack(f"<{_FORMATS[kind]}", content)
