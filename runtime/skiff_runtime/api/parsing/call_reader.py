"""The base of the readers of one tool call, which read it while the model writes it."""

from abc import ABC, abstractmethod


class CallReader(ABC):
    """Reads one call as it comes, in one format, and converts its arguments to JSON.

    ``is_known``: the text is certainly a call of the tool ``name``. Once ``is_done`` or ``is_broken``, nothing more is
    read. ``raw`` is the text that was read before the call was known, which is content if it never becomes known.
    """

    __slots__ = ("_arguments", "is_broken", "is_done", "is_known", "name", "raw")

    def __init__(self) -> None:
        self.name: str | None = None
        self.raw = ""
        self.is_known = self.is_done = self.is_broken = False
        self._arguments: list[str] = []
        """Parts of the arguments since ``take_arguments``: joined there, so that a long text takes linear time."""

    @abstractmethod
    def push(self, text: str) -> str:
        """Read ``text``, and return what is left of it once the call has ended or has turned out to be none."""

    def take_arguments(self) -> str:
        """Return the text of the arguments since the last call of this method, for a call that ``is_known``."""
        text = "".join(self._arguments)
        self._arguments.clear()
        return text
