"""Stop strings: found across token borders, and removed from the text unless the request includes them."""

from typing import Final

_NOT_FOUND: Final = (0, 0)


class StopStringMatcher:
    """Finds the first stop string in one stream of text; of several that end at once, the longest. ``found`` is that string.

    Text that may be the beginning of a stop string is held back until that is decided, unless stop strings are part of
    the output (``include``). Each stop string has a Knuth-Morris-Pratt automaton, so the cost of a character does not
    depend on where the tokens divide the text.
    """

    __slots__ = ("_automata", "_firsts", "_held", "_include", "_states", "found", "stopped")

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._include = include
        self._automata = [(stop, _compute_borders(stop)) for stop in stops]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._states = [0] * len(stops)
        self._held = ""
        """The longest end of the text so far that may begin a stop string."""
        self.stopped = False
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Return the text that can be shown now. Sets ``stopped`` if ``text`` completes a stop string."""
        assert not self.stopped
        # Most text contains no first character of a stop string; it costs one set operation.
        if not self._held and self._firsts.isdisjoint(text):
            return text
        before, buffer = len(self._held), self._held + text
        begin, end = self._advance(text, before)
        if end:
            self.stopped = True
            self.found = buffer[begin:end]
            self._held = ""
            return buffer[before:end] if self._include else buffer[:begin]
        shown = len(buffer) - max(self._states)
        self._held = buffer[shown:]
        return text if self._include else buffer[:shown]

    def flush(self) -> str:
        """Return the text still held back, at the end of the stream."""
        held, self._held = self._held, ""
        return "" if self._include else held

    def _advance(self, text: str, offset: int) -> tuple[int, int]:
        """Advance the automata over ``text``, which begins at ``offset`` of the buffer.

        Returns the start and the end of the stop string that it completes, (0, 0) if there is none.
        """
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
        return _NOT_FOUND


def _compute_borders(pattern: str) -> list[int]:
    """Return, for each prefix, the length of its longest border: a proper prefix that is also a suffix.

    It is the state to fall back to after a mismatch (Knuth, Morris, Pratt 1977).
    """
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders
