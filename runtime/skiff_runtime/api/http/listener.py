"""The listening socket of a server, and how many connections it may hold."""

import resource
import socket
from typing import Final

from skiff_runtime.api.http.protocol import EXTRA_PROBE_CONNECTIONS
from skiff_runtime.errors import ConfigError

LISTEN_BACKLOG: Final = 2048
KEEP_ALIVE_SECONDS: Final = 75
"""Longer than the idle timeout of common load balancers, so that they are the ones to close idle connections.

Otherwise a balancer could send a request on a connection that this server is just closing.
"""
RESERVED_FILE_DESCRIPTORS: Final = EXTRA_PROBE_CONNECTIONS + 64
"""File descriptors that are not clients' connections: sockets between processes, and connections for probes."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. Raises ``ConfigError`` if the address is not free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}; choose another --host or --port"
        ) from None


def raise_file_limit() -> int:
    """Raise the limit on open files to the hard limit. Returns the number of connections that it allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(1, hard - RESERVED_FILE_DESCRIPTORS)
