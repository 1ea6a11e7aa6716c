"""Stop strings: found across token borders, and shown to the client only where that is asked for."""

from typing import Final

_FOUND_NOTHING: Final = (0, 0)


class StopStringMatcher:
    """Follows one stream of text. The stop string that is complete first wins; of several, the longest.

    Text that may be the beginning of a stop string is held back until it is known, unless the stop string
    is part of the text (``include``). Each character costs one step of a Knuth-Morris-Pratt automaton per
    stop string, wherever tokens are cut.
    """

    __slots__ = ("_automata", "_firsts", "_include", "_open", "_states", "stopped")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._include = include
        self._automata = [(stop, _borders(stop)) for stop in stops]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._states = [0] * len(stops)
        self._open = ""
        """The end of the text so far that may begin a stop string."""
        self.stopped = False

    def push(self, text: str) -> str:
        """Text that can be shown now; after a stop string was found, ``stopped`` is set."""
        assert not self.stopped
        if not self._open and self._firsts.isdisjoint(text):
            return text
        before, buffer = len(self._open), self._open + text
        begin, end = self._advance(text, before)
        if end:
            self.stopped = True
            self._open = ""
            return buffer[before:end] if self._include else buffer[:begin]
        shown = len(buffer) - max(self._states)
        self._open = buffer[shown:]
        return text if self._include else buffer[:shown]

    def flush(self) -> str:
        """What is still held back, at the end of the stream."""
        held, self._open = self._open, ""
        return "" if self._include else held

    def _advance(self, text: str, offset: int) -> tuple[int, int]:
        """Take ``text``, which begins at ``offset`` of the buffer; where the stop string that it completes stands."""
        states = self._states
        for position, character in enumerate(text, start=offset + 1):
            longest = 0
            for index, (stop, borders) in enumerate(self._automata):
                state = states[index]
                while state and stop[state] != character:
                    state = borders[state - 1]
                if stop[state] == character:
                    state += 1
                states[index] = state
                if state == len(stop):
                    longest = max(longest, state)
            if longest:
                return position - longest, position
        return _FOUND_NOTHING


def _borders(pattern: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix (Knuth, Morris, Pratt 1977)."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
