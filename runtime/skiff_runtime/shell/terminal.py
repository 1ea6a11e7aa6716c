"""User interfaces of a chat: a terminal with history and line editing, and a pipe."""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from skiff_runtime.shell.chat_client import AnswerDelta, ChatError
from skiff_runtime.shell.conversation import Conversation, ExitChat

GREETING: Final = "Enter sends; Alt-Enter, or \\ at the end of a line, begins a new line; Ctrl-C stops an answer; /help lists the commands."
CONTINUATION: Final = "\\"
_ALLOWED_CONTROLS: Final = "\n\t"


class TerminalChat:
    """A chat at a terminal."""

    def __init__(self, conversation: Conversation, model: str) -> None:
        self._conversation = conversation
        self._model = model
        self._shows_progress = False
        self._prompt: PromptSession[str] = PromptSession(
            history=_history(), key_bindings=_keys(), multiline=True
        )

    def run(self) -> int:
        """Prompt for questions until the user ends the chat, and return the exit code."""
        print(GREETING)
        while True:
            try:
                line = self._prompt.prompt(HTML("<ansigreen><b>you&gt;</b></ansigreen> "))
            except KeyboardInterrupt:
                continue  # Ctrl-C at the prompt discards the line, as in any shell
            except EOFError:
                return 0
            try:
                self._handle(line.strip())
            except ExitChat:
                return 0

    def _handle(self, line: str) -> None:
        if line.startswith("/"):
            print(self._conversation.command(line))
        elif line:
            self._answer(line)

    def show_progress(self, text: str) -> None:
        """Show what an answer waits for, in its place."""
        self._shows_progress = True
        self._begin_answer(f"\x1b[2m{printable(text)}\x1b[0m")

    def _begin_answer(self, text: str = "") -> None:
        """Begin the line of an answer, or begin it anew."""
        print(f"\r\x1b[K\x1b[1;36m{self._model}>\x1b[0m {text}", end="", flush=True)

    def _replace_progress(self, answer: Iterator[AnswerDelta]) -> Iterator[AnswerDelta]:
        for delta in answer:
            if self._shows_progress:
                self._shows_progress = False
                self._begin_answer()
            yield delta

    def _answer(self, question: str) -> None:
        self._shows_progress = False
        self._begin_answer()
        answer = self._conversation.ask(question)
        try:
            _write(self._replace_progress(answer), reasoning=True)
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
    """A chat without a terminal: a question on each line of standard input, answers to standard output.

    A line that ends in a backslash continues on the next.
    """

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def run(self) -> int:
        """Answer every line, and return the exit code, which is 1 if a question failed."""
        failed = False
        for question in _questions(sys.stdin):
            try:
                failed |= not self._handle(question.strip())
            except ExitChat:
                break
        return int(failed)

    def _handle(self, line: str) -> bool:
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


def report_progress(text: str) -> None:
    """Write what an answer waits for to the standard error, so that the standard output has answers alone."""
    print(f"skiff: {printable(text)}", file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """Remove control characters, with which a model's text could control the terminal."""
    return "".join(c for c in text if c.isprintable() or c in _ALLOWED_CONTROLS)


def _questions(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines, joining those that end in a backslash with the next."""
    pending = ""
    for line in lines:
        text = line.rstrip("\r\n")
        if text.endswith(CONTINUATION):
            pending += text.removesuffix(CONTINUATION) + "\n"
            continue
        yield pending + text
        pending = ""
    if pending:
        yield pending


def _write(answer: Iterator[AnswerDelta], *, reasoning: bool = False) -> None:
    """Print an answer as it comes; with ``reasoning``, also the reasoning before it, dimmed."""
    after_reasoning = False
    for delta in answer:
        text = printable(delta.text)
        if not delta.is_reasoning:
            print("\n\n" + text if after_reasoning else text, end="", flush=True)
            after_reasoning = False
        elif reasoning:
            print(f"\x1b[2m{text}\x1b[0m", end="", flush=True)
            after_reasoning = True


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith(CONTINUATION) and buffer.document.is_cursor_at_the_end:
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _break(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """Return the history of questions, a file in the user's state directory; in memory where that cannot be written."""
    base = os.environ.get("XDG_STATE_HOME")
    directory = (Path(base) if base else Path.home() / ".local" / "state") / "skiff"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = directory / "chat_history"
        path.touch(mode=0o600)
    except (OSError, RuntimeError):
        return InMemoryHistory()
    return FileHistory(str(path))
