"""Lingering close: ends a TCP connection without losing the last response (RFC 9112, section 9.6).

If a socket is closed while the client still sends, the kernel answers with a reset, and the reset destroys what the
client has not read yet. So the server closes its sending half first, then reads and discards what arrives, within
limits, until the client closes its half.
"""

import asyncio
from typing import Final

LINGER_SECONDS: Final = 5.0
LINGER_BYTES: Final = 1 << 26
"""Limit on the bytes that are read and discarded on one connection."""


class LingeringClose:
    """The lingering close of one connection. ``begun``: nothing more can be written."""

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
        if not self._transport.can_write_eof():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the client has reset the connection, and the event loop has not noticed it yet
            self._transport.abort()
            return
        self._start_timer()

    def discard(self, count: int) -> None:
        """Count bytes that arrive behind the last request; beyond the limit, abort the connection."""
        self._discarded += count
        if self._discarded > LINGER_BYTES:
            self._transport.abort()

    def stop(self) -> None:
        """Cancel the timer of a connection that was lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self) -> None:
        self._unsent = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(LINGER_SECONDS, self._expire)

    def _expire(self) -> None:
        """Abort the connection, unless the client still reads what was written."""
        if 0 < self._transport.get_write_buffer_size() < self._unsent:
            self._start_timer()
        else:
            self._transport.abort()
