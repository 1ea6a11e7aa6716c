"""Protocol between a tokenizer process and its compiler process: length-prefixed MessagePack over two pipes."""

import os
import struct
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from skiff_runtime.messages import Grammar, decoder, encode

MAX_FRAME_BYTES: Final = 64 << 20
_LENGTH: Final = struct.Struct("<I")
_READ_BYTES: Final = 1 << 20

T = TypeVar("T")


class CompileTask(Struct, frozen=True, tag="task", array_like=True):
    """tokenizer -> compiler: compile ``grammar``."""

    key: bytes
    grammar: Grammar


class CompilerReady(Struct, frozen=True, tag="ready", array_like=True):
    """compiler -> tokenizer: the process has read the vocabulary."""


class CompileResult(Struct, frozen=True, tag="done", array_like=True):
    """compiler -> tokenizer: the grammar in xgrammar's serialized form, or the reason of the ``refusal``."""

    key: bytes
    data: bytes = b""
    refusal: str | None = None


class FrameReader(Generic[T]):
    """Reads frames of one type from a pipe. ``ended``: the writer closed the pipe or violated the protocol."""

    def __init__(self, fd: int, kind: object) -> None:
        self._fd = fd
        self._buffer = bytearray()
        self._decode: msgspec.msgpack.Decoder[T] = decoder(kind)
        self.ended = False

    def read(self) -> list[T]:
        """Read once and return the frames that are complete; none if a non-blocking pipe is empty."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            self.ended = True
        self._buffer += data
        return self._pop_frames()

    def _pop_frames(self) -> list[T]:
        frames = []
        while len(self._buffer) >= _LENGTH.size:
            [length] = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if length > MAX_FRAME_BYTES:
                self.ended = True
            if length > MAX_FRAME_BYTES or len(self._buffer) < end:
                break
            frames.append(self._decode.decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return frames


class FrameWriter:
    """Writes frames to a pipe, which may be non-blocking."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = memoryview(b"")

    def put(self, frame: Struct) -> None:
        """Add a frame to the buffer; ``flush`` writes it."""
        data = encode(frame)
        self._buffer = memoryview(bytes(self._buffer) + _LENGTH.pack(len(data)) + data)

    def flush(self) -> bool:
        """Write as much as the pipe accepts and return True if nothing is left.

        Raises ``BrokenPipeError`` if the reader closed the pipe.
        """
        while self._buffer:
            try:
                written = os.write(self._fd, self._buffer)
            except BlockingIOError:
                return False
            self._buffer = self._buffer[written:]
        return True
