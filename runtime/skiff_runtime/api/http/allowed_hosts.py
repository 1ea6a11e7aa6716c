"""Host header check of a server without keys on loopback: the defence against DNS rebinding.

A page whose own name resolves to 127.0.0.1 has the same origin as a server there, so no origin check stops it; but its
requests carry the page's name in the Host header.
"""

from functools import lru_cache
from ipaddress import ip_address

from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.api.http.request_headers import get_header
from skiff_runtime.errors import HostRefused

_MAX_SHOWN_CHARACTERS: int = 256


class AllowedHosts:
    """The names of this machine's loopback addresses, and those that ``--allowed-hosts`` adds; ``*`` allows all."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = frozenset(name.strip("[]").lower().rstrip(".") for name in names)

    def check(self, headers: Headers) -> None:
        """Raise ``HostRefused`` for a Host header of another name. A request without one does not come from a browser."""
        header = get_header(headers, b"host")
        if not header or "*" in self._names:
            return
        name, loopback = _parse_host(header)
        if name not in self._names and not loopback:
            raise HostRefused(
                f"this server has no keys and is addressed as {name[:_MAX_SHOWN_CHARACTERS]!r}: start it with that "
                "name as --allowed-hosts, or with --api-key, or use http://localhost"
            )


@lru_cache(maxsize=32)  # a client sends the same header with each request, and parsing an address takes 3 µs
def _parse_host(header: bytes) -> tuple[str, bool]:
    """Return (the name in a Host header, whether it means this machine alone)."""
    name = host_name(header.decode("latin-1"))
    return name, is_loopback(name)


def is_loopback(host: str) -> bool:
    """Return whether a host name or address means this machine alone."""
    if host == "localhost" or host.endswith(".localhost"):  # browsers resolve these names themselves
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def host_name(header: str) -> str:
    """Return the name in a Host header in lower case, without port, brackets and trailing dot."""
    name = header.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    return name.partition(":")[0].rstrip(".")
