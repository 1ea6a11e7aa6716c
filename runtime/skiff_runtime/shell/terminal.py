"""Where questions come from and answers go: a terminal with history and editing, or a pipe."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from skiff_runtime.shell.chat_client import ChatError, Piece
from skiff_runtime.shell.conversation import Conversation, Leave

GREETING: Final = "Enter sends, Alt-Enter or a \\ at the end begins a new line, Ctrl-C stops an answer, /help lists commands."
CONTINUED: Final = "\\"
_KEPT_CONTROLS: Final = "\n\t"


class Terminal:
    """A person at a terminal."""

    def __init__(self, conversation: Conversation, model: str) -> None:
        self._conversation = conversation
        self._model = model
        self._prompt: PromptSession[str] = PromptSession(
            history=_history(), key_bindings=_keys(), multiline=True
        )

    def run(self) -> int:
        """Ask until the user leaves; the exit code."""
        print(GREETING)
        while True:
            try:
                line = self._prompt.prompt(HTML("<ansigreen><b>you&gt;</b></ansigreen> "))
            except KeyboardInterrupt:
                continue  # at the prompt it drops the line, as in any shell
            except EOFError:
                return 0
            try:
                self._take(line.strip())
            except Leave:
                return 0

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            print(self._conversation.command(line))
        elif line:
            self._answer(line)

    def _answer(self, question: str) -> None:
        print(f"\x1b[1;36m{self._model}>\x1b[0m ", end="", flush=True)
        answer = self._conversation.ask(question)
        try:
            _write(answer, reasoning=True)
        except KeyboardInterrupt:
            print(" …", end="")
        except ChatError as error:
            print(f"\x1b[31m{printable(str(error))}\x1b[0m", end="")
        finally:
            answer.close()
            print()
        if self._conversation.timing is not None:
            print(f"\x1b[2m[{self._conversation.timing}]\x1b[0m")


class PipedChat:
    """Lines from standard input, answers to standard output, one question a line; a \\ at its end continues it."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def run(self) -> int:
        """Answer every line; the exit code is 1 when any question failed."""
        failed = False
        for question in _questions(sys.stdin):
            try:
                failed |= not self._take(question.strip())
            except Leave:
                break
        return int(failed)

    def _take(self, line: str) -> bool:
        if line.startswith("/"):
            print(self._conversation.command(line), flush=True)
        elif line:
            try:
                _write(self._conversation.ask(line))
            except ChatError as error:
                print(f"skiff: {printable(str(error))}", file=sys.stderr, flush=True)
                return False
            print(flush=True)
        return True


def printable(text: str) -> str:
    """Without control characters, by which a model's text could command the terminal."""
    return "".join(c for c in text if c.isprintable() or c in _KEPT_CONTROLS)


def _questions(lines: Iterable[str]) -> Iterator[str]:
    """Lines, those that end in a backslash joined with the next."""
    held = ""
    for line in lines:
        text = line.rstrip("\r\n")
        if text.endswith(CONTINUED):
            held += text.removesuffix(CONTINUED) + "\n"
            continue
        yield held + text
        held = ""
    if held:
        yield held


def _write(answer: Iterator[Piece], *, reasoning: bool = False) -> None:
    """Print an answer as it comes, with the reasoning before it (dimmed) where that is wanted."""
    reasoned = False
    for piece in answer:
        text = printable(piece.text)
        if not piece.is_reasoning:
            print("\n\n" + text if reasoned else text, end="", flush=True)
            reasoned = False
        elif reasoning:
            print(f"\x1b[2m{text}\x1b[0m", end="", flush=True)
            reasoned = True


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(CONTINUED) and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _break(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """Questions of earlier sessions, in the user's state directory; in memory where that cannot be written."""
    base = os.environ.get("XDG_STATE_HOME")
    directory = (Path(base) if base else Path.home() / ".local" / "state") / "skiff"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / "chat_history"
        path.touch(mode=0o600)
    except (OSError, RuntimeError):
        return InMemoryHistory()
    return FileHistory(str(path))
