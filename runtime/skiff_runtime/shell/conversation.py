"""What was said so far, and the commands that steer it; knows nothing of terminals."""

import json
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from skiff_runtime.shell.chat_client import ChatClient, ChatError, Message, Piece
from skiff_runtime.shell.sampling_parameters import PARAMETERS, parse_parameter

HELP: Final = """\
/help               these lines
/reset              forget the conversation
/system TEXT        tell the model how to behave, and start afresh; without TEXT: show it
/set NAME VALUE     change how answers are made, as in /set temperature 0.5; VALUE default: the server's;
                    without any: show what is set
/save FILE          write the conversation as JSON
/exit               leave (also Ctrl-D)"""


class Leave(Exception):
    """The user wants to go."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How fast an answer came: seconds to its first token, tokens, and seconds from the first to the last."""

    first_seconds: float
    tokens: int
    rest_seconds: float

    def __str__(self) -> str:
        text = f"{self.tokens} tokens, first after {self.first_seconds * 1e3:,.0f} ms"
        if self.tokens > 1 and self.rest_seconds > 0:
            text += f", then {(self.tokens - 1) / self.rest_seconds:,.1f} tokens/s"
        return text


class Conversation:
    """The turns of one chat with one model. ``timing`` is that of the latest answer, None if there was none."""

    def __init__(self, client: ChatClient, system: str | None = None, **parameters: Any) -> None:
        self.timing: Timing | None = None
        self._client = client
        self._system = system
        self._parameters = parameters
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """All messages, the system's first."""
        head = [{"role": "system", "content": self._system}] if self._system else []
        return head + self._turns

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """The answer as it comes. A part that was heard before the iterator is closed is remembered.

        Reasoning is not, for models do not expect to see it again.

        ChatError leaves the conversation as it was before the question.
        """
        heard: list[str] = []
        self.timing = None
        started = time.perf_counter()
        first = last = started
        told = 0
        messages = [*self.messages, {"role": "user", "content": question}]
        stream = self._client.stream(messages, self._parameters)
        try:
            for piece in stream:
                last = time.perf_counter()
                first = first if told else last
                told += 1
                if not piece.is_reasoning:
                    heard.append(piece.text)
                yield piece
        except ChatError:
            heard.clear()
            told = 0
            raise
        finally:
            stream.close()
            if told:
                tokens = self._client.output_tokens or told
                self.timing = Timing(first - started, tokens, last - first)
            if heard:
                self._turns.append({"role": "user", "content": question})
                self._turns.append({"role": "assistant", "content": "".join(heard)})

    def command(self, line: str) -> str:
        """Do what a line that begins with a slash says; what to show for it. Leave for /exit."""
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word == "/help":
            return HELP
        if word == "/reset":
            self._turns.clear()
            return "The conversation starts afresh."
        if word == "/system":
            return self._set_system(rest)
        if word == "/set":
            return self._set(rest)
        if word == "/save":
            return self._save(rest)
        if word in ("/exit", "/quit"):
            raise Leave
        return f"There is no command {word}; /help lists them."

    def _set_system(self, text: str) -> str:
        if not text:
            return self._system or "There is no system message."
        self._system = text
        self._turns.clear()
        return "Noted; the conversation starts afresh."

    def _set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if not name:
            set_now = [f"{name} {value}" for name, value in sorted(self._parameters.items())]
            return "\n".join(set_now) or f"Nothing is set; there are {', '.join(PARAMETERS)}."
        try:
            parsed = parse_parameter(name, value.strip())
        except ValueError as error:
            return f"{error}."
        if parsed is None:
            self._parameters.pop(name, None)
            return f"{name} is the server's choice."
        self._parameters[name] = parsed
        return f"{name} is {parsed}."

    def _save(self, name: str) -> str:
        if not name:
            return "Give a file, as in /save chat.json."
        path = Path(name).expanduser()
        saved = {"model": self._client.model, "parameters": self._parameters, "messages": self.messages}
        try:
            path.write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        except (OSError, UnicodeError) as error:
            return f"{path} cannot be written: {error}."
        return f"{len(self.messages)} messages are in {path}."
