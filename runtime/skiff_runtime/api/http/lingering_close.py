"""Lingering close: how a TCP connection ends without losing the last reply (RFC 9112, section 9.6).

A socket that is closed while the client still sends makes the kernel answer with a reset, and a reset destroys what the
client has not read yet. So the sending half is closed first; what still comes is read and forgotten, within limits, until the
client closes its half.
"""

import asyncio
from typing import Final

LINGER_SECONDS: Final = 5.0
LINGER_BYTES: Final = 1 << 26
"""Most that is read and forgotten on one connection."""


class LingeringClose:
    """The end of one connection."""

    __slots__ = ("_discarded", "_loop", "_timer", "_transport", "_unsent", "begun")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._discarded = 0
        self._unsent = 0
        self.begun = False

    def begin(self) -> None:
        """Close the sending half behind what is written already."""
        if self.begun or self._transport.is_closing():
            return
        self.begun = True
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._watch()
        else:
            self._transport.close()

    def discard(self, count: int) -> None:
        """Count bytes that come behind the last request; beyond the limit the connection ends at once."""
        self._discarded += count
        if self._discarded > LINGER_BYTES:
            self._transport.abort()

    def stop(self) -> None:
        """Forget the timer: the connection is gone."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _watch(self) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(LINGER_SECONDS, self._expire)

    def _expire(self) -> None:
        """End the connection, unless the client is still reading what was written."""
        if 0 < self._transport.get_write_buffer_size() < self._unsent:
            self._watch()
        else:
            self._transport.abort()
