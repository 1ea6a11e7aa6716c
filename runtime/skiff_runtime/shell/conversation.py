"""What was said so far, and the commands that steer it; knows nothing of terminals."""

from collections.abc import Generator
from typing import Final

from skiff_runtime.shell.client import ChatClient, ChatError, Message

HELP: Final = """\
/help           these lines
/reset          forget the conversation
/system TEXT    tell the model how to behave, and start afresh; without TEXT: show it
/exit           leave (also Ctrl-D)"""


class Leave(Exception):
    """The user wants to go."""


class Conversation:
    """The turns of one chat with one model."""

    def __init__(self, client: ChatClient, system: str | None = None) -> None:
        self._client = client
        self._system = system
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """All messages, the system's first."""
        head = [{"role": "system", "content": self._system}] if self._system else []
        return head + self._turns

    def ask(self, question: str) -> Generator[str, None, None]:
        """The answer as it comes. A part that was heard before the iterator is closed is remembered.

        ChatError leaves the conversation as it was before the question.
        """
        heard: list[str] = []
        stream = self._client.stream([*self.messages, {"role": "user", "content": question}])
        try:
            for text in stream:
                heard.append(text)
                yield text
        except ChatError:
            heard.clear()
            raise
        finally:
            stream.close()
            if heard:
                self._turns.append({"role": "user", "content": question})
                self._turns.append({"role": "assistant", "content": "".join(heard)})

    def command(self, line: str) -> str:
        """Do what a line that begins with a slash says; what to show for it. Leave for /exit."""
        word, _, rest = line.strip().partition(" ")
        if word == "/help":
            return HELP
        if word == "/reset":
            self._turns.clear()
            return "The conversation starts afresh."
        if word == "/system":
            return self._set_system(rest.strip())
        if word in ("/exit", "/quit"):
            raise Leave
        return f"There is no command {word}; /help lists them."

    def _set_system(self, text: str) -> str:
        if not text:
            return self._system or "There is no system message."
        self._system = text
        self._turns.clear()
        return "Noted; the conversation starts afresh."
