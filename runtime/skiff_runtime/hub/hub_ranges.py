"""Byte ranges of a model's files, from a hub that serves them by plain HTTP: a mirror, or the hub itself without Xet.

huggingface_hub receives such a file in one stream. Here each file is located once, by the request that the library
makes too, and its ranges are read from the storage to which the hub redirects. The address there is signed and
expires; then the file is located again.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import httpx2
from huggingface_hub import get_session

from skiff_runtime.errors import FetchError
from skiff_runtime.transfer.range_source import RangesUnsupported, RemoteObject, TransientSourceError

PIECE_BYTES: Final = 256 << 10
TRANSIENT_STATUSES: Final = frozenset({408, 429, 500, 502, 503, 504})
_TIMEOUT: Final = httpx2.Timeout(60.0, connect=10.0)


@dataclass(slots=True)
class Location:
    """The address of a file's content. ``is_hub``: it is on the hub itself, which needs the token."""

    url: str
    is_hub: bool
    has_answered: bool = False


class HubRanges:
    """The files of one model that a hub serves by plain HTTP, as a ``RangeSource``."""

    def __init__(self, locate: Callable[[str], Location | None], hub_headers: dict[str, str]) -> None:
        """``locate`` returns the address of a file by its name; None if it is to be received by Xet."""
        self._locate = locate
        self._hub_headers = hub_headers
        self._locations: dict[str, Location] = {}
        self._lock = threading.Lock()

    def locate(self, name: str, expired: Location | None = None) -> Location:
        """Return the address of a file, a new one in place of ``expired``. Raises ``RangesUnsupported`` for a Xet file."""
        with self._lock:
            known = self._locations.get(name)
            if known is not None and known is not expired:
                return known  # another thread has located it
            found = self._locate(name)
            if found is None:
                raise RangesUnsupported(f"the hub serves {name} by Xet")
            self._locations[name] = found
            return found

    def supports_ranges(self, remote: RemoteObject) -> bool:
        """Return True: ``stream`` raises ``RangesUnsupported`` if the storage shows otherwise."""
        return True

    def stream(self, remote: RemoteObject, start: int, stop: int) -> Iterator[Any]:
        """Yield a range of the file."""
        location = self.locate(remote.name)
        headers = {
            **(self._hub_headers if location.is_hub else {}),
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",
        }
        host = httpx2.URL(location.url).host
        try:
            with get_session().stream("GET", location.url, headers=headers, timeout=_TIMEOUT) as response:
                self._check(response, remote, location, f"bytes {start}-{stop - 1}/{remote.size_bytes}")
                location.has_answered = True
                yield from response.iter_raw(PIECE_BYTES)
        except httpx2.TooManyRedirects as error:
            raise FetchError(f"{host} redirects in a loop") from error
        except (httpx2.HTTPError, httpx2.StreamError) as error:
            raise TransientSourceError(
                f"no answer from {host} ({type(error).__name__}); check the network and the proxy"
            ) from error

    def _check(
        self, response: httpx2.Response, remote: RemoteObject, location: Location, expected: str
    ) -> None:
        """Return if the answer is the range, else raise what follows from it."""
        status, host = response.status_code, response.url.host
        if status == httpx2.codes.PARTIAL_CONTENT and response.headers.get("Content-Range") == expected:
            return
        if status in TRANSIENT_STATUSES:
            retry_after = response.headers.get("Retry-After", "")
            raise TransientSourceError(
                f"{host} answered {status}",
                wait_seconds=float(retry_after) if retry_after.isdecimal() else 0.0,
            )
        if location.has_answered and status >= httpx2.codes.BAD_REQUEST:
            self.locate(remote.name, expired=location)
            raise TransientSourceError(f"{host} answered {status}: the address has expired")
        raise RangesUnsupported(f"{host} answers {status} to a request for a range of {remote.name}")
