"""Ports of the loopback interface for servers that a test tells which one to take."""

import itertools
import os
import socket
from typing import Final

_FIRST: Final = 10_000
_COUNT: Final = 20_000
"""All are below 32,768, from where Linux takes the ports of connections: another test's could use a port meanwhile."""
_numbers = itertools.count(os.getpid() * 97)
"""Each process begins elsewhere, and none returns a port twice in a row."""


def free_port() -> int:
    """Return a port that nothing listens on."""
    for number in itertools.islice(_numbers, _COUNT):
        port = _FIRST + number % _COUNT
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port
    raise OSError("no port is free")
