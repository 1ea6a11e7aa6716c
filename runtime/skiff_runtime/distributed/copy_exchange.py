"""Exchange of large messages between two ranks by the copy engines of their GPUs, beside the kernels that run meanwhile.

Two ranks sum a message if each sends its part to the other and adds both. A copy engine does that without a
multiprocessor, so a part that is computed in chunks is sent chunk by chunk while the next chunk is computed, and the
kernel that reads the sum adds the parts itself. A part crosses NVLink once in each direction, as in any other all-reduce of
two ranks; among n ranks it would cross n - 1 times, where a reduce-scatter and an all-gather take 2 (n - 1) / n.

**Why no copy overwrites what is still read.** Each rank has one buffer into which its peer copies. An exchange has two
barriers. A rank comes to the first one behind everything that has read its buffer, so a copy, which starts behind it on both
ranks, finds the buffer free. A rank comes to the second one when its copies have ended, so behind it the peer's part is
complete. No rank passes a barrier that the other has not come to, also not one that has waited for too long
(``barrier_kernel``). All of this is ordered on the device, and the addresses stay the same, so graphs can capture it.
"""

from typing import Final

import torch

from skiff_runtime.distributed.symmetric_memory import SymmetricBuffer
from skiff_runtime.kernels.triton.all_reduce.barrier import barrier
from skiff_runtime.kernels.triton.all_reduce.peer_memory import PeerMemory

EXCHANGE_RANKS: Final = 2


class CopyExchange:
    """The buffer of one of two ranks, and its copies into that of the other one."""

    def __init__(
        self,
        memory: PeerMemory,
        received: torch.Tensor,
        peer: torch.Tensor,
        buffer: SymmetricBuffer | None = None,
    ) -> None:
        """``received`` uint8 [n] is this rank's buffer, ``peer`` that of the other rank; ``buffer`` is kept alive.

        ``memory`` is what the barriers wait in.
        """
        assert memory.ranks == EXCHANGE_RANKS
        self._memory = memory
        self._received = received
        self._peer = peer
        self._buffer = buffer
        self._stream = None
        if received.device.type == "cuda":
            self._stream = torch.cuda.Stream(received.device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def capacity(self) -> int:
        """The bytes of the largest message."""
        return self._received.nbytes

    def start(self, message: torch.Tensor) -> "PendingExchange":
        """Begin to exchange a contiguous message [T, n] of at most ``capacity`` bytes; its rows may be computed afterwards.

        Both ranks begin the same exchanges in the same order, and no other collective before ``finish``.
        """
        assert message.is_contiguous() and message.nbytes <= self.capacity
        received, peer = (
            each[: message.nbytes].view(message.dtype).view(message.shape)
            for each in (self._received, self._peer)
        )
        return PendingExchange(message, received, peer, self._memory, self._stream)


class PendingExchange:
    """An exchange of one message [T, n], which this rank computes and sends in chunks of rows."""

    def __init__(
        self,
        message: torch.Tensor,
        received: torch.Tensor,
        peer: torch.Tensor,
        memory: PeerMemory,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._message = message
        self._received = received
        self._peer = peer
        self._memory = memory
        self._stream = stream
        self._is_peer_ready = False

    def send(self, rows: slice) -> None:
        """Send rows that have been computed, beside whatever is launched next; they must not change until ``finish``."""
        if not self._is_peer_ready:
            # Behind the first chunk, because the other rank has long read the last message by then.
            barrier(self._memory)
            self._is_peer_ready = True
        if self._stream is None:
            self._peer[rows] = self._message[rows]
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._message.device))
        with torch.cuda.stream(self._stream):
            self._peer[rows].copy_(self._message[rows], non_blocking=True)

    def finish(self) -> torch.Tensor:
        """Return the other rank's message [T, n], valid until the next exchange; all rows must have been sent."""
        if self._stream is not None:
            torch.cuda.current_stream(self._message.device).wait_stream(self._stream)
        barrier(self._memory)
        return self._received
