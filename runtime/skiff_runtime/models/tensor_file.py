"""One safetensors file: a header parsed and checked by the safetensors library, and reads from any thread.

The library itself maps a file and copies its tensors on one thread. Parallel reads straight into the destination load
weights several times as fast, so only the library's parser is used.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from safetensors import SafetensorError, safe_open

from skiff_runtime.errors import ModelError

_LENGTH_BYTES: Final = 8
"""A file begins with the length of its header, a 64-bit integer."""
ELEMENT_BITS: Final = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "C64": 64,
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
"""Every dtype that the library reads; all are needed, because an offset is the sum of the sizes before it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file: its rows follow each other from ``offset``; ``dtype`` is the name that the format uses."""

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes from one index of the first dimension to the next one."""
        return math.prod(self.shape[1:]) * ELEMENT_BITS[self.dtype] // 8

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * ELEMENT_BITS[self.dtype] // 8

    @property
    def end(self) -> int:
        """The offset behind the tensor."""
        return self.offset + self.nbytes


class TensorFile:
    """An open safetensors file. Every error is a ``ModelError`` that names it.

    ``max_header_bytes`` bounds the list of its tensors; the library has a bound of 100 MB.
    """

    def __init__(self, path: Path, *, max_header_bytes: int | None = None) -> None:
        if not path.is_file():
            raise ModelError(f"weights file {path} is missing; download the model again")
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"cannot read weights file {path}: {error.strerror}") from None
        try:
            header_bytes = self._read_header_length()
            # The library judges a length that the file cannot have.
            is_whole = _LENGTH_BYTES + header_bytes <= path.stat().st_size
            if max_header_bytes is not None and is_whole and header_bytes > max_header_bytes:
                raise ModelError(
                    f"weights file {path} lists its tensors in {header_bytes} bytes, but at most {max_header_bytes} are "
                    "supported"
                )
            self.tensors = self._read_header(_LENGTH_BYTES + header_bytes)
        except OSError as error:
            self.close()
            raise ModelError(f"cannot read weights file {path}: {error}") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file; reads fail from then on."""
        os.close(self._descriptor)

    def read(self, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the bytes at ``offset``. Safe in any thread."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._descriptor, [target[done:]], offset + done)
            except OSError as error:
                raise ModelError(f"cannot read weights file {self.path}: {error.strerror}") from None
            if count == 0:
                raise self._corrupt("it ends early")
            done += count

    def _read_header_length(self) -> int:
        length = bytearray(_LENGTH_BYTES)
        self.read(memoryview(length), 0)
        return int.from_bytes(length, "little")

    def _read_header(self, end: int) -> dict[str, StoredTensor]:
        try:
            with safe_open(self.path, framework="numpy") as opened:
                return self._locate_tensors(opened, end)
        except SafetensorError as error:
            raise self._corrupt(str(error)) from None
        except OSError as error:
            raise ModelError(f"cannot read weights file {self.path}: {error}") from None

    def _locate_tensors(self, opened: Any, offset: int) -> dict[str, StoredTensor]:
        """Compute the tensors' offsets, which the library does not report; the first one is ``offset``.

        The library refuses a file whose tensors overlap, leave holes or do not end with the file, so each tensor begins
        where the one before it ends.
        """
        tensors = {}
        for name in opened.offset_keys():
            stored = opened.get_slice(name)
            dtype, shape = stored.get_dtype(), tuple(stored.get_shape())
            if dtype not in ELEMENT_BITS:
                raise ModelError(
                    f"weights file {self.path}: tensor {name!r} is of type {dtype}, which is not supported"
                )
            tensors[name] = stored_tensor = StoredTensor(dtype, shape, offset)
            offset = stored_tensor.end
        return tensors

    def _corrupt(self, reason: str) -> ModelError:
        return ModelError(
            f"weights file {self.path} is truncated or corrupt ({reason}); download the model again"
        )
