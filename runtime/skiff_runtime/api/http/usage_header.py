"""The header that reports a request's token counts to a router, which does not parse responses.

A request with ``X-Skiff-Usage`` gets the counts in a header of the same name: in the head of a JSON response, and at the end
of a stream in a trailer, because a stream's head is written before its tokens are computed. That head has the counts of the
prompt, for a stream whose client leaves. The value is a dictionary of RFC 9651: ``prompt=12, cached=4, completion=30``.
"""

import re
from typing import Final, NamedTuple

USAGE_HEADER: Final = b"x-skiff-usage"
_VALUE: Final = re.compile(
    rb"prompt=(?P<prompt>\d{1,15}), cached=(?P<cached>\d{1,15})(?:, completion=(?P<completion>\d{1,15}))?"
)


class TokenCounts(NamedTuple):
    """Token counts of a request. ``cached``: those of ``prompt`` that were not computed again."""

    prompt: int
    cached: int
    completion: int


def format_usage_header(counts: TokenCounts, *, is_final: bool) -> bytes:
    """Return the header's value, without the tokens of the completion unless they are final."""
    value = b"prompt=%d, cached=%d" % (counts.prompt, counts.cached)
    return value + b", completion=%d" % counts.completion if is_final else value


def parse_usage_header(value: bytes) -> tuple[TokenCounts, bool] | None:
    """Return the counts of a header and whether they are final; None for a malformed value."""
    match = _VALUE.fullmatch(value)
    if match is None:
        return None
    completion = match["completion"]
    return TokenCounts(
        int(match["prompt"]), int(match["cached"]), int(completion or 0)
    ), completion is not None
