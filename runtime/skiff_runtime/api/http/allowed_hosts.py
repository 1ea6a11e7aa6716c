"""Host names by which a server without keys may be addressed on loopback: the defence against DNS rebinding.

A page whose own name resolves to 127.0.0.1 is of the same origin as a server there, so no check of origins stops it;
but its requests carry its name in the Host header.
"""

from functools import lru_cache
from ipaddress import ip_address

from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.api.http.request_body import get_header
from skiff_runtime.errors import HostRefused

_MAX_SHOWN: int = 256


class AllowedHosts:
    """The names of this machine's loopback addresses, and those that ``--allowed-hosts`` adds; ``*`` is all."""

    def __init__(self, named: tuple[str, ...]) -> None:
        self._named = frozenset(name.strip("[]").lower().rstrip(".") for name in named)

    def check(self, headers: Headers) -> None:
        """Raise ``HostRefused`` for a Host header of another name. Without the header it is no browser that asks."""
        given = get_header(headers, b"host")
        if not given or "*" in self._named:
            return
        name, loopback = _parse(given)
        if name not in self._named and not loopback:
            raise HostRefused(
                f"this server has no keys and is addressed as {name[:_MAX_SHOWN]!r}: start it with that name as "
                "--allowed-hosts, or with --api-key, or use http://localhost"
            )


@lru_cache(maxsize=32)  # a client sends the same header with each request, and parsing an address takes 3 us
def _parse(header: bytes) -> tuple[str, bool]:
    """Return the name in a Host header, and whether it means this machine alone."""
    name = host_name(header.decode("latin-1"))
    return name, is_loopback(name)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address means this machine alone."""
    if host == "localhost" or host.endswith(".localhost"):  # browsers resolve these themselves
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """Return the name in a Host header, without port, brackets and a final dot, in lower case."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")
