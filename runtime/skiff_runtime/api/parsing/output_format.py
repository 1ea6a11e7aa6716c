"""The output format of the served model: its tool call format, its special tokens, and whether it reasons.

It is detected once, when the api process starts, from the model's files and the options.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import msgspec

from skiff_runtime.api.parsing import hermes, llama3, mistral, reasoning_parser
from skiff_runtime.api.parsing.reasoning_parser import ReasoningStart, detect_reasoning_start
from skiff_runtime.api.parsing.tool_parser import ToolCallFormat
from skiff_runtime.errors import InvalidRequest, ModelError
from skiff_runtime.messages import ChatPrompt
from skiff_runtime.processes.launch import Launch
from skiff_runtime.vocabulary.tokenizer_files import TokenizerFiles, read_tokenizer_files

REASONING_SWITCHES: Final = ("enable_thinking", "thinking")
"""Variables by which chat templates turn reasoning on and off."""
Switch = tuple[str, bool]


class _AddedToken(msgspec.Struct):
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """``tool_call_format`` is None where the model calls no tools. ``special_tokens``: their texts.

    ``reasoning_starts`` maps each switch that a request can set, and None for no switch, to the start of the output. It
    is None if the model does not reason, or if its reasoning is to stay in the content.
    """

    tool_call_format: ToolCallFormat | None = None
    special_tokens: frozenset[str] = frozenset()
    reasoning_starts: Mapping[Switch | None, ReasoningStart] | None = None

    @classmethod
    def from_launch(cls, launch: Launch) -> Self:
        """Detect the format from the model's files and the options of a launch."""
        files = read_tokenizer_files(launch.model.path, launch.model.tokenizer_path)
        config, template = launch.config, files.template or ""
        reasons = config.reasoning_parser == "think" or (
            config.reasoning_parser == "auto"
            and (reasoning_parser.OPEN in template or reasoning_parser.CLOSE in template)
        )
        return cls(
            tool_call_format=select_tool_call_format(config.tool_call_parser, files.template),
            special_tokens=_read_special_tokens(files.tokenizer),
            reasoning_starts=_find_reasoning_starts(files) if reasons else None,
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
            text = str(prompt.messages[-1].get("content"))
            is_open = text.rfind(reasoning_parser.OPEN) > text.rfind(reasoning_parser.CLOSE)
            return ReasoningStart.INSIDE if is_open else ReasoningStart.AFTER
        if not prompt.add_generation_prompt:
            return ReasoningStart.OPTIONAL
        for name in REASONING_SWITCHES:
            value = prompt.template_options.get(name)
            if isinstance(value, bool):
                return self.reasoning_starts[name, value]
        return self.reasoning_starts[None]


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
        case "none":
            return None
    if "tools" not in template:
        return None
    if mistral.CALLS in template:
        return mistral_format
    if hermes.OPEN in template:
        return hermes.HERMES
    is_llama3 = llama3.TAG in template or "<|start_header_id|>" in template
    return llama3.LLAMA3 if is_llama3 else None


def _read_special_tokens(path: Path) -> frozenset[str]:
    try:
        tokens = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None
    return frozenset(token.content for token in tokens if token.special)


def _find_reasoning_starts(files: TokenizerFiles) -> dict[Switch | None, ReasoningStart]:
    """Render a prompt for each switch: rendering the prompt of every request would take the api process too long."""
    # Imported here because jinja2 takes 2 MiB, which the server of a model without reasoning saves.
    from skiff_runtime.vocabulary.chat_template import ChatTemplate

    template = ChatTemplate(files.template, files.special_tokens)
    switches: list[Switch | None] = [None]
    switches += [(name, value) for name in REASONING_SWITCHES for value in (False, True)]
    return {switch: _find_reasoning_start(template.render, switch) for switch in switches}


def _find_reasoning_start(render: Callable[[ChatPrompt], str], switch: Switch | None) -> ReasoningStart:
    options = {} if switch is None else {switch[0]: switch[1]}
    try:
        prompt = render(ChatPrompt([{"role": "user", "content": "-"}], template_options=options))
    except InvalidRequest:  # a template that needs more than this message
        return ReasoningStart.OPTIONAL
    return detect_reasoning_start(prompt)
