"""One safetensors file: its header, checked, and reads from any thread."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from skiff_runtime.errors import ModelError

MAX_HEADER_BYTES: Final = 100_000_000
"""As in the format's own library."""
_LENGTH_BYTES: Final = 8
_METADATA: Final = "__metadata__"
ELEMENT_BITS: Final = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor stands in its file, row after row, and what it is; ``kind`` is the format's name of its type."""

    kind: str
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes from one index of the first dimension to the next."""
        return math.prod(self.shape[1:]) * ELEMENT_BITS[self.kind] // 8


class TensorFile:
    """An open file. Every error is a ``ModelError`` that names it."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise ModelError(f"weights file {path} is missing; download the model again")
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot read weights file {path}: {error.strerror}") from None
        try:
            self.tensors = self._header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """No reads any more."""
        os.close(self._descriptor)

    def read(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the bytes from ``offset`` on."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise ModelError(f"cannot read weights file {self.path}: {error.strerror}") from None
            if count == 0:
                raise self._broken("it ends too early")
            done += count

    def _header(self) -> dict[str, StoredTensor]:
        size = os.fstat(self._descriptor).st_size
        if size < _LENGTH_BYTES:
            raise self._broken("it is shorter than any")
        length = int.from_bytes(self._bytes(_LENGTH_BYTES, 0), "little")
        if length > min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise self._broken("its header is longer than it can be")
        try:
            header = json.loads(self._bytes(length, _LENGTH_BYTES))
        except (ValueError, RecursionError):
            raise self._broken("its header is not JSON") from None
        if not isinstance(header, dict):
            raise self._broken("its header is not a JSON object")
        begin = _LENGTH_BYTES + length
        return {
            name: self._tensor(name, entry, begin, size)
            for name, entry in header.items()
            if name != _METADATA
        }

    def _tensor(self, name: str, entry: Any, begin: int, size: int) -> StoredTensor:
        """A header's entry, if it is one; what it promises must be in the file."""
        match entry:
            case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(first), int(last)]} if (
                kind in ELEMENT_BITS and all(isinstance(each, int) and each >= 0 for each in shape)
            ):
                bits = math.prod(shape) * ELEMENT_BITS[kind]
                if 0 <= first <= last <= size - begin and (last - first) * 8 == bits:
                    return StoredTensor(kind, tuple(shape), begin + first)
        raise self._broken(f"what its header says of {name!r} cannot be")

    def _bytes(self, count: int, offset: int) -> bytearray:
        taken = bytearray(count)
        self.read(memoryview(taken), offset)
        return taken

    def _broken(self, why: str) -> ModelError:
        return ModelError(
            f"weights file {self.path} is truncated or corrupt ({why}); download the model again"
        )
