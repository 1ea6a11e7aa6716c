"""The formats of tool calls: how each is recognised, read, and made sure of by a grammar."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from skiff_runtime.api.parsing import hermes, llama3, mistral
from skiff_runtime.api.parsing.tool_parser import ToolParser

Form = dict[str, Any]
"""A part of a structural tag, in xgrammar's words."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as a grammar sees it. ``schema``: JSON schema of its arguments."""

    name: str
    schema: Any


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """One format. A list of calls is ``opening``, calls parted by ``separator``, ``closing``.

    ``marks``: strings of the format that may be special tokens, which a client's text would leave out, and which no
    grammar can ask for.
    """

    name: str
    parser: type[ToolParser]
    marks: tuple[str, ...]
    opening: tuple[str, ...] = ()
    before_name: tuple[str, ...] = ('{"name": "',)
    before_arguments: tuple[str, ...] = ('", "arguments": ',)
    after_arguments: tuple[str, ...] = ("}",)
    separator: tuple[str, ...] = (", ",)
    closing: tuple[str, ...] = ()

    def is_text(self, special: frozenset[str]) -> bool:
        """Whether a grammar can write calls: no mark that they need is a special token."""
        written = {*self.opening, *self.before_name, *self.before_arguments, *self.after_arguments}
        return special.isdisjoint(written)

    def calls(self, tools: Sequence[Tool], *, several: bool) -> Form:
        """One call of one of the tools, or with ``several`` one or more."""
        call = _either([self._call(tool) for tool in tools])
        parts = [*_texts(self.opening), call]
        if several:
            parts.append({"type": "star", "content": _sequence([*_texts(self.separator), call])})
        return _sequence([*parts, *_texts(self.closing)])

    def triggered_calls_format(self, tools: Sequence[Tool]) -> Form | None:
        """Any text, in which calls are as they should be; None where the format has no mark that begins a call."""
        if self.opening or not self.marks or self.before_name[0] not in self.marks:
            return None
        tags = []
        for tool in tools:
            head = "".join((*self.before_name, tool.name, *self.before_arguments))
            content = {"type": "json_schema", "json_schema": tool.schema}
            tags.append(
                {"type": "tag", "begin": head, "content": content, "end": "".join(self.after_arguments)}
            )
        return {"type": "triggered_tags", "triggers": [self.before_name[0]], "tags": tags}

    def _call(self, tool: Tool) -> Form:
        arguments = {"type": "json_schema", "json_schema": tool.schema}
        name = {"type": "const_string", "value": tool.name}
        return _sequence(
            [
                *_texts(self.before_name),
                name,
                *_texts(self.before_arguments),
                arguments,
                *_texts(self.after_arguments),
            ]
        )


HERMES: Final = ToolCallFormat(
    "hermes",
    hermes.HermesParser,
    (hermes.OPEN, hermes.CLOSE),
    before_name=(hermes.OPEN, '\n{"name": "'),
    after_arguments=("}\n", hermes.CLOSE),
    separator=("\n",),
)
LLAMA3: Final = ToolCallFormat(
    "llama3", llama3.Llama3Parser, (llama3.TAG,), before_arguments=('", "parameters": ',), separator=("; ",)
)
MISTRAL: Final = ToolCallFormat(
    "mistral", mistral.MistralParser, (mistral.CALLS,), opening=(mistral.CALLS, "["), closing=("]",)
)
MISTRAL_V11: Final = ToolCallFormat(
    "mistral",
    mistral.MistralParser,
    (mistral.CALLS, mistral.ARGS),
    before_name=(mistral.CALLS,),
    before_arguments=(mistral.ARGS,),
    after_arguments=(),
    separator=(),
)
LIST: Final = ToolCallFormat("list", mistral.ListParser, (), opening=("[",), closing=("]",))
"""For answers that must call, in place of a format whose marks are special tokens: a JSON list and nothing else."""


def select_tool_call_format(choice: str, template: str | None) -> ToolCallFormat | None:
    """The format that ``--tool-call-parser`` names, or that the chat template (for ``auto``) was written for."""
    template = template or ""
    named = MISTRAL_V11 if mistral.ARGS in template else MISTRAL
    match choice:
        case "hermes":
            return HERMES
        case "llama3":
            return LLAMA3
        case "mistral":
            return named
        case "none":
            return None
    if "tools" not in template:
        return None
    if mistral.CALLS in template:
        return named
    if hermes.OPEN in template:
        return HERMES
    return LLAMA3 if llama3.TAG in template or "<|start_header_id|>" in template else None


def _texts(texts: tuple[str, ...]) -> list[Form]:
    return [{"type": "const_string", "value": text} for text in texts]


def _sequence(parts: list[Form]) -> Form:
    return {"type": "sequence", "elements": parts}


def _either(forms: list[Form]) -> Form:
    return forms[0] if len(forms) == 1 else {"type": "or", "elements": forms}
