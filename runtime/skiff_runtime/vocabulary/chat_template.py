"""Chat templates: a conversation is rendered to a prompt in jinja2's sandbox, bounded in size and time.

A template belongs to the model and is not trusted. It runs in an immutable sandbox, writes at most
``MAX_RENDERED_CHARACTERS`` and runs at most ``RENDER_TIMEOUT_SECONDS``. An error in it ends one request only.
"""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any, Final, NoReturn

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Name, Node
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from skiff_runtime.errors import InvalidRequest
from skiff_runtime.messages import ChatPrompt

MAX_RENDERED_CHARACTERS: Final = 32 << 20
RENDER_TIMEOUT_SECONDS: Final = 5.0
_MAX_EXPONENT: Final = 64
_MAX_MESSAGE_CHARACTERS: Final = 500
_MARK: Final = "[the answer continues here: 5b1f6c0e] "
"""Added to the end of a message that the answer continues. A template that trims contents removes its final blank."""

_TEMPLATE_FAULTS: Final = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TimeoutError,
    TypeError,
    ValueError,
)
"""Every exception that a template's own expressions can raise."""


class ChatTemplate:
    """The chat template of one model. ``source`` is None if the model has none; then ``render`` raises."""

    def __init__(self, source: str | None, special_tokens: dict[str, str]) -> None:
        self._special_tokens = special_tokens
        self._template: jinja2.Template | None = None
        self._variables: frozenset[str] = frozenset()
        self.fault = "the model has no chat template; use /v1/completions, or serve a chat model"
        if source is not None:
            self._compile(source)

    def _compile(self, source: str) -> None:
        try:
            environment = _Environment()
            self._template = environment.from_string(source)
            names = environment.parse(source).find_all(Name)
            self._variables = frozenset(each.name for each in names if each.ctx == "load")
        except jinja2.TemplateSyntaxError as error:
            self.fault = f"the model's chat template is malformed: line {error.lineno}: {_shorten(error)}"
        except (RecursionError, ValueError) as error:
            self.fault = f"the model's chat template is malformed: {_shorten(error)}"

    @property
    def is_usable(self) -> bool:
        """True if the model has a template that compiles; otherwise ``fault`` has the reason."""
        return self._template is not None

    @property
    def shows_tools(self) -> bool:
        """True if the template reads the tools of a request."""
        return "tools" in self._variables

    def render(self, prompt: ChatPrompt) -> str:
        """Render the prompt. Raises ``InvalidRequest`` with the template's own message if the template rejects it.

        A template that runs for too long is interrupted by a timer signal. Python handles signals in the main thread
        only: every tokenizer process renders there, but in another thread of an offline caller nothing interrupts it.
        """
        if self._template is None:
            raise InvalidRequest(self.fault, param="messages", code="chat_template_error")
        if prompt.tools and not self.shows_tools:
            raise InvalidRequest(
                "the model's chat template does not show tools to the model, so it could not call them; remove 'tools', or "
                "start the server with --chat-template and a template that renders them",
                param="tools",
                code="unsupported_parameter",
            )
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": _add_mark(prompt.messages) if prompt.continue_final_message else prompt.messages,
            "tools": prompt.tools,
            "documents": None,
            "add_generation_prompt": prompt.add_generation_prompt,
        }
        self._check_options(prompt.template_options, variables)
        hints = {name: value for name, value in prompt.template_hints.items() if name in self._variables}
        try:
            with _deadline(RENDER_TIMEOUT_SECONDS):
                text = _join_bounded(
                    self._template.generate({**hints, **prompt.template_options, **variables})
                )
        except _TEMPLATE_FAULTS as error:
            raise InvalidRequest(
                f"the model's chat template refused these messages: {_shorten(error)}",
                param="messages",
                code="chat_template_error",
            ) from None
        return _cut_at_mark(text) if prompt.continue_final_message else text

    def _check_options(self, options: dict[str, Any], variables: dict[str, Any]) -> None:
        for name in options:
            if name in variables or name in self._special_tokens:
                raise InvalidRequest(
                    f"{name!r} is no option of the chat template; the request itself or the model sets it",
                    param="chat_template_kwargs",
                )


def _add_mark(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return ``messages`` with a mark at the end of the final one's content."""
    *others, final = messages
    content = final.get("content")
    if not isinstance(content, str) or not content.strip():
        raise InvalidRequest(
            "'continue_final_message' needs a final message with content for the answer to continue",
            param="continue_final_message",
        )
    return [*others, {**final, "content": content + _MARK}]


def _cut_at_mark(text: str) -> str:
    """Return ``text`` up to the mark. If the template trimmed the mark's final blank, trim the content as well."""
    end = text.rfind(_MARK.rstrip())
    if end < 0:
        raise InvalidRequest(
            "the model's chat template does not write the final message unchanged, so the answer cannot continue it",
            param="continue_final_message",
            code="chat_template_error",
        )
    return text[:end] if text.startswith(_MARK, end) else text[:end].rstrip()


class _GenerationBlock(Extension):
    """``{% generation %} ... {% endgeneration %}``, which marks training targets: renders its body."""

    tags: set[str] = {"generation"}  # noqa: RUF012 (jinja2 declares it as an instance variable)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """The functions and filters that templates of the Hugging Face hub expect, with bounded products and powers."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and not (abs(left) < 1 << 64 and abs(right) <= _MAX_EXPONENT):
            raise SecurityError("a power in the template is too large")
        if operator == "*" and _product_length(left, right) > MAX_RENDERED_CHARACTERS:
            raise SecurityError("a repetition in the template is too long")
        return super().call_binop(context, operator, left, right)


def _product_length(left: Any, right: Any) -> int:
    """Return the length of a repeated sequence; 0 for a product of numbers."""
    if isinstance(left, str | list | tuple) and isinstance(right, int):
        return len(left) * right
    if isinstance(right, str | list | tuple) and isinstance(left, int):
        return len(right) * left
    return 0


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # As in transformers. Jinja2's own filter escapes the characters of HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _join_bounded(pieces: Iterator[str]) -> str:
    parts = []
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_RENDERED_CHARACTERS:
            raise ValueError(f"it wrote more than {MAX_RENDERED_CHARACTERS} characters")
        parts.append(piece)
    return "".join(parts)


def _raise_timeout(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise TimeoutError(f"it ran for more than {RENDER_TIMEOUT_SECONDS:g} s")


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in the block after ``seconds``; in other threads than the main one, never."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def _shorten(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_MESSAGE_CHARACTERS else text[:_MAX_MESSAGE_CHARACTERS] + "..."
