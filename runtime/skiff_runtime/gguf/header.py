"""The header of a GGUF file (versions 2 and 3): its metadata and its tensor table, read within limits.

The file is not trusted. The ``gguf`` package's reader allocates whatever a header asks for and reads past the end of a
truncated file without an error, so the header is parsed here: counts and lengths are checked before anything is
allocated by them, and every tensor must lie inside of the file. All sizes are Python integers, which do not overflow.
"""

import hashlib
import math
import struct
from collections.abc import Collection
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

from skiff_runtime.errors import ModelError
from skiff_runtime.gguf.ggml_types import GGML_TYPES, GgmlType

SUFFIX: Final = ".gguf"
MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)

MAX_HEADER_BYTES: Final = 256 << 20
"""The largest known vocabularies take 20 MiB."""
MAX_METADATA: Final = 1 << 14
MAX_TENSORS: Final = 1 << 17
MAX_KEY_BYTES: Final = 1 << 10
MAX_STRING_BYTES: Final = 16 << 20
MAX_ARRAY_ELEMENTS: Final = 1 << 23
MAX_DIMENSIONS: Final = 4
MAX_ALIGNMENT: Final = 1 << 20
MAX_QUOTED: Final = 80
"""Characters of a value that a message quotes."""
_DEFAULT_ALIGNMENT: Final = 32
_ALIGNMENT_KEY: Final = "general.alignment"
_READ_BYTES: Final = 1 << 20
_SCALARS: Final = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
"""Formats of ``struct`` by GGUF's number of a metadata type; a boolean (7) is one byte, 0 or 1."""
_BOOL: Final = 7
_STRING: Final = 8
_ARRAY: Final = 9


@dataclass(frozen=True, slots=True)
class UnreadArray:
    """The length of an array in the metadata whose elements were not requested."""

    length: int


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in a file: its rows follow each other from ``offset``. ``shape`` is in PyTorch's order, rows first."""

    type: GgmlType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes from one index of the first dimension to the next one; of one element in a one-dimensional tensor."""
        elements = math.prod(self.shape[1:])
        return elements // self.type.block_elements * self.type.block_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) // self.type.block_elements * self.type.block_bytes


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """Metadata by key, tensors by name, and the SHA-256 of all of it."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    digest: str


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` names a GGUF file, which need not exist. A directory is none, whatever its name."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def quote_value(value: Any) -> str:
    """Return a value of the metadata for a message, cut where it is long."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    text = repr(value[: MAX_QUOTED + 1] if isinstance(value, str) else value)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def read_header(path: Path, arrays: Collection[str] = ()) -> GgufHeader:
    """Read the header of ``path``, with the elements of the arrays whose keys are in ``arrays``.

    Raises ``ModelError`` that names the file, and the tensor or the key, if it is malformed, larger than the limits or
    truncated.
    """
    try:
        with path.open("rb") as stream:
            return _HeaderReader(path, stream, path.stat().st_size, arrays).read()
    except OSError as error:
        raise ModelError(f"cannot read GGUF file {path}: {error.strerror or error}") from None


class _HeaderReader:
    """The position in one header, and the bytes of it that were read so far."""

    def __init__(self, path: Path, stream: BufferedReader, file_bytes: int, arrays: Collection[str]) -> None:
        self._path = path
        self._stream = stream
        self._file_bytes = file_bytes
        self._arrays = arrays
        self._data = bytearray()
        self._at = 0

    def read(self) -> GgufHeader:
        num_tensors, num_metadata = self._read_counts()
        metadata: dict[str, Any] = {}
        for _ in range(num_metadata):
            key = self._string(MAX_KEY_BYTES, "a metadata key")
            if key in metadata:
                raise self._corrupt(f"the key {key!r} occurs twice")
            metadata[key] = self._value(key)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        digest = hashlib.sha256(memoryview(self._data)[: self._at]).hexdigest()
        tensors = self._locate(entries, self._alignment(metadata))
        return GgufHeader(self._path, metadata, tensors, digest)

    def _read_counts(self) -> tuple[int, int]:
        """Return (tensors, metadata keys)."""
        if self._file_bytes < len(MAGIC) or self._take(len(MAGIC), "its magic number") != MAGIC:
            raise ModelError(f"{self._path} is not a GGUF file: it does not begin with {MAGIC.decode()!r}")
        version = self._number("I", "its version")
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0
            known = " and ".join(map(str, VERSIONS))
            raise ModelError(
                f"GGUF file {self._path} is {'big-endian' if swapped else f'of version {version}'}, which is not "
                f"supported; supported are little-endian files of versions {known}"
            )
        tensors, metadata = self._number("Q", "its counts"), self._number("Q", "its counts")
        self._check("tensors", tensors, MAX_TENSORS)
        self._check("metadata keys", metadata, MAX_METADATA)
        return tensors, metadata

    def _value(self, key: str) -> Any:
        what = f"the value of {key!r}"
        kind = self._number("I", what)
        if kind == _STRING:
            return self._string(MAX_STRING_BYTES, what)
        if kind != _ARRAY:
            return self._scalars(kind, 1, what)[0]
        kind, length = self._number("I", what), self._number("Q", what)
        self._check(f"elements of {key!r}", length, MAX_ARRAY_ELEMENTS)
        wanted = key in self._arrays
        if kind == _STRING:
            return self._strings(length, what) if wanted else self._skip_strings(length, what)
        if wanted:
            return self._scalars(kind, length, what)
        self._skip(length * struct.calcsize(self._format(kind, what)), what)
        return UnreadArray(length)

    def _scalars(self, kind: int, count: int, what: str) -> list[Any]:
        form = f"<{count}{self._format(kind, what)}"
        values = list(struct.unpack(form, self._take(struct.calcsize(form), what)))
        if kind != _BOOL:
            return values
        if any(value > 1 for value in values):
            raise self._corrupt(f"{what} is neither true nor false")
        return [bool(value) for value in values]

    def _format(self, kind: int, what: str) -> str:
        if kind not in _SCALARS:
            raise self._corrupt(f"{what} is of the unknown type {kind}")
        return _SCALARS[kind]

    def _strings(self, count: int, what: str) -> list[str]:
        return [self._string(MAX_STRING_BYTES, what) for _ in range(count)]

    def _skip_strings(self, count: int, what: str) -> UnreadArray:
        """Skip an array of strings; a vocabulary has hundreds of thousands, and every process of a service skips them."""
        unpack = struct.Struct("<Q").unpack_from
        at = self._at
        for _ in range(count):
            if at + 8 > len(self._data):
                self._fill(at + 8, what)
            [length] = unpack(self._data, at)
            at += 8 + length
            if at > self._file_bytes:
                raise self._truncated(what)
        self._fill(at, what)
        self._at = at
        return UnreadArray(count)

    def _tensor_entry(self) -> tuple[str, GgmlType, tuple[int, ...], int]:
        """Return (name, type, shape, offset in the file's data) of the next tensor."""
        name = self._string(MAX_KEY_BYTES, "a tensor's name")
        what = f"the entry of tensor {name!r}"
        count = self._number("I", what)
        self._check(f"dimensions of tensor {name!r}", count, MAX_DIMENSIONS)
        dimensions = struct.unpack(f"<{count}Q", self._take(8 * count, what))
        kind, offset = self._number("I", what), self._number("Q", what)
        if not dimensions or 0 in dimensions:
            raise self._corrupt(f"tensor {name!r} has no elements")
        if kind not in GGML_TYPES:
            supported = ", ".join(each.name for each in GGML_TYPES.values())
            raise ModelError(
                f"GGUF file {self._path}: tensor {name!r} is of GGML type {kind}, which is not supported; supported "
                f"are {supported}"
            )
        ggml_type = GGML_TYPES[kind]
        if dimensions[0] % ggml_type.block_elements:
            raise self._corrupt(
                f"rows of tensor {name!r} have {dimensions[0]} elements, no multiple of {ggml_type.name}'s block of "
                f"{ggml_type.block_elements}"
            )
        if ggml_type.is_quantized and count == 1:
            raise self._corrupt(f"tensor {name!r} has one dimension but is of type {ggml_type.name}")
        return name, ggml_type, dimensions[::-1], offset

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get(_ALIGNMENT_KEY, _DEFAULT_ALIGNMENT)
        if not isinstance(value, int) or not 1 <= value <= MAX_ALIGNMENT or value & (value - 1):
            raise self._corrupt(f"{_ALIGNMENT_KEY!r} must be a power of two, not {quote_value(value)}")
        return value

    def _locate(
        self, entries: list[tuple[str, GgmlType, tuple[int, ...], int]], alignment: int
    ) -> dict[str, GgufTensor]:
        """Return the tensors at their offsets in the file, which contains all of each and none twice."""
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, ggml_type, shape, offset in entries:
            tensor = GgufTensor(ggml_type, shape, start + offset)
            if name in tensors:
                raise self._corrupt(f"tensor {name!r} occurs twice")
            if offset % alignment:
                raise self._corrupt(f"tensor {name!r} is not aligned to {alignment} bytes")
            if tensor.offset + tensor.nbytes > self._file_bytes:
                raise self._corrupt(
                    f"tensor {name!r} ends at byte {tensor.offset + tensor.nbytes}, the file at {self._file_bytes}"
                )
            tensors[name] = tensor
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise self._corrupt(f"tensor {name!r} overlaps the one before it")
            end = tensor.offset + tensor.nbytes
        return tensors

    def _string(self, limit: int, what: str) -> str:
        length = self._number("Q", what)
        if length > limit:
            raise self._corrupt(f"{what} has {length} bytes; at most {limit} are read")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError:
            raise self._corrupt(f"{what} is not valid UTF-8") from None

    def _number(self, form: str, what: str) -> int:
        size = struct.calcsize(f"<{form}")
        [value] = struct.unpack(f"<{form}", self._take(size, what))
        return int(value)

    def _take(self, count: int, what: str) -> bytes:
        """Return the next ``count`` bytes."""
        end = self._at + count
        if end > len(self._data):
            self._fill(end, what)
        with memoryview(self._data) as data:  # a slice of the array itself would be another copy
            taken = bytes(data[self._at : end])
        self._at = end
        return taken

    def _skip(self, count: int, what: str) -> None:
        """Pass over the next ``count`` bytes."""
        self._fill(self._at + count, what)
        self._at += count

    def _fill(self, end: int, what: str) -> None:
        """Read on until the first ``end`` bytes of the file are in memory."""
        if end > self._file_bytes:
            raise self._truncated(what)
        if end > MAX_HEADER_BYTES:
            raise self._corrupt(f"its header is longer than {MAX_HEADER_BYTES >> 20} MiB")
        while len(self._data) < end:
            chunk = self._stream.read(max(_READ_BYTES, end - len(self._data)))
            if not chunk:
                raise self._truncated(what)
            self._data += chunk

    def _check(self, noun: str, count: int, limit: int) -> None:
        if count > limit:
            raise self._corrupt(f"it has {count} {noun}; at most {limit} are read")

    def _truncated(self, what: str) -> ModelError:
        return self._corrupt(f"it ends inside of {what}")

    def _corrupt(self, reason: str) -> ModelError:
        return ModelError(
            f"GGUF file {self._path} is truncated or corrupt ({reason}); download the model again"
        )
