"""The header by which a router numbers its requests, so that a pod can tell it which of them its reports include.

``X-Skiff-Router: ROUTER/NUMBER`` names the router, by the ID with which it follows ``GET /events``, and the request. The load
events of that stream list the numbers of the requests that they include for the first time.
"""

import re
from typing import Final, NamedTuple

from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.api.http.request_headers import get_header

ROUTER_HEADER: Final = b"x-skiff-router"
ROUTER_ID: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_VALUE: Final = re.compile(rb"(?P<router>[A-Za-z0-9-]{1,64})/(?P<number>\d{1,15})")


class RouterRequest(NamedTuple):
    """A request as its router names it. ``number``: unique among the requests of the router with this ID."""

    router_id: str
    number: int


def format_router_header(router_id: str, number: int) -> bytes:
    """Return the header's value."""
    return b"%b/%d" % (router_id.encode(), number)


def parse_router_header(headers: Headers) -> RouterRequest | None:
    """Return the router's name of a request; None for one that comes from no router, or with a malformed value."""
    match = _VALUE.fullmatch(get_header(headers, ROUTER_HEADER))
    return None if match is None else RouterRequest(match["router"].decode(), int(match["number"]))
