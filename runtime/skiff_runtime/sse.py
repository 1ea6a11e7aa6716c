"""Server-sent events as OpenAI's API sends them: the reading side, shared by the shell and the benchmarks."""

from typing import Final

from skiff_runtime.errors import SkiffError

DONE: Final = b"[DONE]"
MAX_EVENT_BYTES: Final = 4 << 20
_FIELD: Final = b"data:"


class EventDecoder:
    """Turns pieces of a stream, cut anywhere, into the events' data. Other fields than ``data`` are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that ``piece`` completes; SkiffError for an event without end."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > MAX_EVENT_BYTES:
            raise SkiffError(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(_FIELD):
                self._data.append(line.removeprefix(_FIELD).removeprefix(b" "))
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events
