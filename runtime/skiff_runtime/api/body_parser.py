"""A second parser for a connection whose request offered another protocol.

A server may ignore such an offer, and this one does: Java's client makes one ("h2c") with every first request.
httptools stops behind the head that makes it and takes the body for the other protocol's. So a fresh parser reads on:
it is fed a head of our own that announces the same body, in silence, and then what the client sent behind its head.
"""

from typing import Any

import httptools

from skiff_runtime.api.http.asgi import Headers
from skiff_runtime.api.http.framing import render_framing_head


class _AfterHead:
    """Passes a parser's events on from the end of its first head."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._passing = False

    def on_message_begin(self) -> None:
        if self._passing:
            self._protocol.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self._passing:
            self._protocol.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._passing:
            self._protocol.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._passing:
            self._protocol.on_headers_complete()
        self._passing = True

    def on_body(self, body: bytes) -> None:
        self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        self._protocol.on_message_complete()


def make_parser(protocol: Any) -> httptools.HttpRequestParser:
    """A parser that calls ``protocol``, and goes on behind a request that says it is the last.

    ``protocol`` decides itself what becomes of such surplus bytes; the parser would call them an error.
    """
    parser = httptools.HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


def body_parser(protocol: Any, headers: Headers) -> tuple[httptools.HttpRequestParser, bytes]:
    """A parser that reads on behind a head with these ``headers``, and what must be fed to it first."""
    return make_parser(_AfterHead(protocol)), render_framing_head(headers)
