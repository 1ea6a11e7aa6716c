"""A conversation with a model, and the slash commands that control it. Independent of the terminal."""

import json
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from skiff_runtime.shell.chat_client import AnswerDelta, ChatClient, ChatError, Message
from skiff_runtime.shell.sampling_parameters import PARAMETERS, parse_parameter

HELP: Final = """\
/help               show this help
/reset              start a new conversation
/system TEXT        set the system message and start a new conversation; without TEXT, show it
/set NAME VALUE     set a sampling parameter, as in /set temperature 0.5; the VALUE default restores
                    the server's default; without NAME, show the parameters that are set
/save FILE          write the conversation as JSON
/exit               quit (also Ctrl-D)"""


class ExitChat(Exception):
    """The user has ended the chat."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Speed of an answer: the time to its first token, and the time from its first to its last token."""

    ttft_seconds: float
    tokens: int
    decode_seconds: float

    def __str__(self) -> str:
        text = f"{self.tokens} tokens, first after {self.ttft_seconds * 1e3:,.0f} ms"
        if self.tokens > 1 and self.decode_seconds > 0:
            text += f", then {(self.tokens - 1) / self.decode_seconds:,.1f} tokens/s"
        return text


class Conversation:
    """The messages of one chat with one model. ``timing`` is that of the latest answer, None before the first."""

    def __init__(self, client: ChatClient, system: str | None = None, **parameters: Any) -> None:
        self.timing: Timing | None = None
        self._client = client
        self._system = system
        self._parameters = parameters
        self._turns: list[Message] = []

    @property
    def messages(self) -> list[Message]:
        """All messages, the system message first."""
        head = [{"role": "system", "content": self._system}] if self._system else []
        return head + self._turns

    def ask(self, question: str) -> Generator[AnswerDelta, None, None]:
        """Yield the answer as it comes, and add question and answer to the conversation.

        Where the iterator is closed early, the part of the answer that was yielded is added. Reasoning is not: chat
        templates expect earlier answers without it. After a ``ChatError`` the conversation is as it was before.
        """
        parts: list[str] = []
        self.timing = None
        started = time.perf_counter()
        first = last = started
        num_deltas = 0
        messages = [*self.messages, {"role": "user", "content": question}]
        stream = self._client.stream(messages, self._parameters)
        try:
            for delta in stream:
                last = time.perf_counter()
                first = first if num_deltas else last
                num_deltas += 1
                if not delta.is_reasoning:
                    parts.append(delta.text)
                yield delta
        except ChatError:
            parts.clear()
            num_deltas = 0
            raise
        finally:
            stream.close()
            if num_deltas:
                tokens = self._client.output_tokens or num_deltas
                self.timing = Timing(first - started, tokens, last - first)
            if parts:
                self._turns.append({"role": "user", "content": question})
                self._turns.append({"role": "assistant", "content": "".join(parts)})

    def command(self, line: str) -> str:
        """Run a line that begins with a slash, and return the text to show. Raises ``ExitChat`` for /exit."""
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if word == "/help":
            return HELP
        if word == "/reset":
            self._turns.clear()
            return "Started a new conversation."
        if word == "/system":
            return self._set_system(rest)
        if word == "/set":
            return self._set(rest)
        if word == "/save":
            return self._save(rest)
        if word in ("/exit", "/quit"):
            raise ExitChat
        return f"There is no command {word}; /help lists them."

    def _set_system(self, text: str) -> str:
        if not text:
            return self._system or "There is no system message."
        self._system = text
        self._turns.clear()
        return "Set the system message and started a new conversation."

    def _set(self, text: str) -> str:
        name, _, value = text.partition(" ")
        name = name.replace("-", "_")
        if not name:
            set_now = [f"{name} {value}" for name, value in sorted(self._parameters.items())]
            return "\n".join(set_now) or f"Nothing is set; the parameters are {', '.join(PARAMETERS)}."
        try:
            parsed = parse_parameter(name, value.strip())
        except ValueError as error:
            return f"{error}."
        if parsed is None:
            self._parameters.pop(name, None)
            return f"{name} is the server's default."
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
        return f"Wrote {len(self.messages)} messages to {path}."
