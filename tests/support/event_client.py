"""A client of ``GET /events`` that reads one event at a time and checks the stream's numbering."""

import contextlib
from collections.abc import Callable, Iterator

import httpx
import msgspec

from skiff_runtime.state_events import HEARTBEAT, StateEvent

_DECODER: "msgspec.json.Decoder[StateEvent]" = msgspec.json.Decoder(StateEvent)


class EventClient:
    """One stream. ``heartbeats``: comments so far."""

    def __init__(self, response: httpx.Response) -> None:
        self.heartbeats = 0
        self._parts = response.iter_raw()
        self._rest = b""
        self._number = 0

    def next(self) -> StateEvent | None:
        """Return the next event, None for the end of the stream."""
        while True:
            while b"\n\n" not in self._rest:
                part = next(self._parts, None)
                if part is None:
                    assert not self._rest
                    return None
                self._rest += part
            text, _, self._rest = self._rest.partition(b"\n\n")
            if text + b"\n\n" == HEARTBEAT:
                self.heartbeats += 1
                continue
            number, data = text.split(b"\n")
            assert number == b"id: %d" % self._number, "the numbers have no gap"
            self._number += 1
            return _DECODER.decode(data.removeprefix(b"data: "))

    def until(self, condition: Callable[[StateEvent], bool]) -> StateEvent:
        """Return the first event that meets a condition."""
        while (event := self.next()) is not None:
            if condition(event):
                return event
        raise AssertionError("the stream ended before the event")


@contextlib.contextmanager
def following(url: str, *include: str, router: str = "") -> Iterator[EventClient]:
    """Follow the events of the service at ``url``, as the router with this ID if it is not empty."""
    query: dict[str, str | list[str]] = {"include": list(include)}
    if router:
        query["router"] = router
    with httpx.stream("GET", f"{url}/events", params=query, timeout=30) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"] == "text/event-stream"
        yield EventClient(response)
