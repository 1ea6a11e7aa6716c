"""What the tokenizer and its compiler process tell each other: length-prefixed MessagePack over two pipes."""

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
    """tokenizer -> compiler."""

    key: bytes
    grammar: Grammar


class CompilerReady(Struct, frozen=True, tag="ready", array_like=True):
    """compiler -> tokenizer: the vocabulary is read."""


class CompileResult(Struct, frozen=True, tag="done", array_like=True):
    """compiler -> tokenizer: the compiled form, or why there is none."""

    key: bytes
    data: bytes = b""
    refusal: str | None = None


class FrameReader(Generic[T]):
    """Frames of one kind from a pipe. ``ended``: the other side has closed it, or wrote what is no frame."""

    def __init__(self, fd: int, kind: object) -> None:
        self._fd = fd
        self._buffer = bytearray()
        self._decode: msgspec.msgpack.Decoder[T] = decoder(kind)
        self.ended = False

    def read(self) -> list[T]:
        """The frames that one read completes; where the pipe is non-blocking, perhaps none."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            self.ended = True
        self._buffer += data
        return self._frames()

    def _frames(self) -> list[T]:
        found = []
        while len(self._buffer) >= _LENGTH.size:
            [length] = _LENGTH.unpack_from(self._buffer)
            end = _LENGTH.size + length
            if length > MAX_FRAME_BYTES:
                self.ended = True
            if length > MAX_FRAME_BYTES or len(self._buffer) < end:
                break
            found.append(self._decode.decode(bytes(self._buffer[_LENGTH.size : end])))
            del self._buffer[:end]
        return found


class FrameWriter:
    """Frames to a pipe, which may be non-blocking."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffer = memoryview(b"")

    def put(self, frame: Struct) -> None:
        """Take a frame; ``flush`` writes it."""
        data = encode(frame)
        self._buffer = memoryview(bytes(self._buffer) + _LENGTH.pack(len(data)) + data)

    def flush(self) -> bool:
        """Write on; whether all is written. Raises ``BrokenPipeError`` when nobody reads any more."""
        while self._buffer:
            try:
                written = os.write(self._fd, self._buffer)
            except BlockingIOError:
                return False
            self._buffer = self._buffer[written:]
        return True
