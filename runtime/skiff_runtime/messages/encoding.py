"""The encoding of messages, and the dtypes of their columns."""

from enum import IntEnum
from typing import Final, TypeVar

import msgspec
import numpy as np

MAX_MESSAGE_BYTES: Final = 1 << 30
NO_TOKEN: Final = -1
"""In the ``tokens`` column: this row ends its request without a new token."""


class Wire:
    """Numpy dtypes of the columns."""

    UID: Final = np.dtype("<i8")
    TOKEN: Final = np.dtype("<i4")
    FINISH: Final = np.dtype("u1")
    LOGPROB: Final = np.dtype("<f4")
    VECTOR: Final = np.dtype("<f4")


class FinishReason(IntEnum):
    """The reason for which a request ended. ``RUNNING``: it has not. ``TIMEOUT``: its deadline passed."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    ABORT = 3
    TIMEOUT = 4


T = TypeVar("T")
encode = msgspec.msgpack.Encoder().encode


def decoder(kind: type[T] | object) -> "msgspec.msgpack.Decoder[T]":
    """Make a strict decoder for one socket's union of messages."""
    return msgspec.msgpack.Decoder(kind)
