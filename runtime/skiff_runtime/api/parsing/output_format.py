"""The output format of the served model: its tool call format, its special tokens, and whether it reasons.

It is detected once, when the api process starts, from the model's files and the options.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from skiff_runtime.api.parsing import hermes, llama3, mistral, pythonic, qwen3_coder, reasoning_parser
from skiff_runtime.api.parsing.reasoning_parser import (
    REASONING_FORMATS,
    THINK,
    ReasoningFormat,
    ReasoningStart,
)
from skiff_runtime.api.parsing.tool_parser import ToolCallFormat
from skiff_runtime.errors import InvalidRequest, ModelError
from skiff_runtime.messages import ChatPrompt
from skiff_runtime.processes.launch import Launch
from skiff_runtime.vocabulary.tokenizer_files import TokenizerFiles, read_tokenizer_files

REASONING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off."""
_EFFORT: Final = "reasoning_effort"
_EFFORT_OPTION: Final = "chat_template_kwargs.reasoning_effort"
"""Name of the switch of an effort that a request sends as an option of the template, without the other hints."""
REASONING_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
Switch = tuple[str, bool | str]
"""A variable of the template with its value."""


class _AddedToken(msgspec.Struct):
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """``tool_call_format`` is None where the model calls no tools. ``special_tokens``: their texts.

    ``reasoning_starts`` maps each switch that a request can set, and None for no switch, to the start of the output. It
    is None if the model does not reason, or if its reasoning is to stay in the content. ``reasoning_format``: the markers
    of the reasoning.
    """

    tool_call_format: ToolCallFormat | None = None
    special_tokens: frozenset[str] = frozenset()
    reasoning_starts: Mapping[Switch | None, ReasoningStart] | None = None
    reasoning_format: ReasoningFormat = THINK

    @classmethod
    def from_launch(cls, launch: Launch) -> Self:
        """Detect the format from the model's files and the options of a launch."""
        files = read_tokenizer_files(
            launch.model.path, launch.model.tokenizer_path, chat_template=launch.config.chat_template
        )
        config = launch.config
        reasoning_format = select_reasoning_format(config.reasoning_parser, files.template)
        return cls(
            tool_call_format=select_tool_call_format(config.tool_call_parser, files.template),
            special_tokens=_read_special_tokens(files.tokenizer),
            reasoning_starts=None
            if reasoning_format is None
            else _find_reasoning_starts(files, reasoning_format),
            reasoning_format=reasoning_format or THINK,
        )

    def reasoning_switch(self) -> str | None:
        """Return the variable that turns reasoning on and off, None if the chat template has none that is known."""
        starts = self.reasoning_starts
        if starts is None:
            return None
        return next(
            (name for name in REASONING_SWITCHES if starts[name, False] is not starts[name, True]), None
        )

    def reasoning_start(self, prompt: ChatPrompt) -> ReasoningStart | None:
        """Return how the output starts after ``prompt``; None if reasoning is not parsed."""
        if self.reasoning_starts is None:
            return None
        if prompt.continue_final_message:
            return self.reasoning_format.find_start(str(prompt.messages[-1].get("content")))
        if not prompt.add_generation_prompt:
            return ReasoningStart.OPTIONAL
        for name in REASONING_SWITCHES:
            value = prompt.template_options.get(name)
            if isinstance(value, bool):
                return self.reasoning_starts[name, value]
        if _EFFORT in prompt.template_options and self._reads_effort_option():
            return self._start_of_effort(_EFFORT_OPTION, prompt.template_options[_EFFORT])
        return self._start_of_effort(_EFFORT, prompt.template_hints.get(_EFFORT))

    def _reads_effort_option(self) -> bool:
        """Return whether the effort by itself changes the start: most templates read a switch instead."""
        assert self.reasoning_starts is not None
        default = self.reasoning_starts[None]
        return any(
            self.reasoning_starts.get((_EFFORT_OPTION, effort), default) is not default
            for effort in REASONING_EFFORTS
        )

    def _start_of_effort(self, name: str, effort: Any) -> ReasoningStart:
        """Return the start for an effort, which is any value of JSON; templates treat an unknown one like none at all."""
        assert self.reasoning_starts is not None
        default = self.reasoning_starts[None]
        return self.reasoning_starts.get((name, effort), default) if isinstance(effort, str) else default


def effort_hints(effort: str) -> dict[str, Any]:
    """Return what a chat template may know of a reasoning effort: its word, or a switch that "none" turns off."""
    return {"reasoning_effort": effort, **dict.fromkeys(REASONING_SWITCHES, effort != "none")}


def select_tool_call_format(choice: str, template: str | None) -> ToolCallFormat | None:
    """Return the format that ``--tool-call-parser`` names; for "auto", the one that the chat template was written for."""
    template = template or ""
    mistral_format = mistral.MISTRAL_V11 if mistral.ARGS in template else mistral.MISTRAL
    match choice:
        case "hermes":
            return hermes.HERMES
        case "llama3":
            return llama3.LLAMA3
        case "mistral":
            return mistral_format
        case "pythonic":
            return pythonic.PYTHONIC
        case "qwen3_coder":
            return qwen3_coder.QWEN3_CODER
        case "none":
            return None
    if "tools" not in template:
        return None
    if mistral.CALLS in template:
        return mistral_format
    if qwen3_coder.FUNCTION in template and qwen3_coder.PARAMETER in template:
        return qwen3_coder.QWEN3_CODER
    if hermes.OPEN in template:
        return hermes.HERMES
    if any(sign in template for sign in pythonic.TEMPLATE_SIGNS):
        return pythonic.PYTHONIC
    is_llama3 = llama3.TAG in template or "<|start_header_id|>" in template
    return llama3.LLAMA3 if is_llama3 else None


def select_reasoning_format(choice: str, template: str | None) -> ReasoningFormat | None:
    """Return the format that ``--reasoning-parser`` names; for "auto", the one whose markers the chat template has."""
    if choice != "auto":
        return REASONING_FORMATS.get(choice)
    formats = (THINK, reasoning_parser.MISTRAL)
    return next(
        (each for each in formats if any(marker in (template or "") for marker in each.markers)), None
    )


def _read_special_tokens(path: Path) -> frozenset[str]:
    try:
        tokens = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None
    return frozenset(token.content for token in tokens if token.special)


def _find_reasoning_starts(
    files: TokenizerFiles, reasoning_format: ReasoningFormat
) -> dict[Switch | None, ReasoningStart]:
    """Render a prompt for each switch: rendering the prompt of every request would take the api process too long."""
    # Imported here because jinja2 takes 2 MiB, which the server of a model without reasoning saves.
    from skiff_runtime.vocabulary.chat_template import ChatTemplate

    template = ChatTemplate(files.template, files.special_tokens)
    switches: list[Switch | None] = [None]
    switches += [(name, value) for name in REASONING_SWITCHES for value in (False, True)]
    switches += [(name, effort) for name in (_EFFORT, _EFFORT_OPTION) for effort in REASONING_EFFORTS]
    return {switch: _find_reasoning_start(template.render, switch, reasoning_format) for switch in switches}


def _find_reasoning_start(
    render: Callable[[ChatPrompt], str], switch: Switch | None, reasoning_format: ReasoningFormat
) -> ReasoningStart:
    options: dict[str, Any] = {}
    hints: dict[str, Any] = {}
    match switch:
        case (name, effort) if name == _EFFORT_OPTION:
            options = {_EFFORT: effort}
        case (_, str(effort)):
            hints = effort_hints(effort)
        case (name, value):
            options = {name: value}
    messages = [{"role": "user", "content": "-"}]
    try:
        prompt = render(ChatPrompt(messages, template_options=options, template_hints=hints))
    except InvalidRequest:  # a template that needs more than this message
        prompt = ""
    return reasoning_format.detect_start(prompt)
