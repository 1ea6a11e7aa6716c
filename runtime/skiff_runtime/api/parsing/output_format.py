"""What the served model's answers are made of, found out once from its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

import msgspec

from skiff_runtime.api.parsing import reasoning_parser as reasoning
from skiff_runtime.api.parsing.dialects import ToolCallFormat, select_tool_call_format
from skiff_runtime.api.parsing.reasoning_parser import ReasoningStart, detect_reasoning_start
from skiff_runtime.errors import InvalidRequest, ModelError
from skiff_runtime.messages import ChatPrompt
from skiff_runtime.processes.launch import Launch
from skiff_runtime.vocabulary.tokenizer_files import TokenizerFiles, read_tokenizer_files

SWITCHES: Final = ("enable_thinking", "thinking")
"""Options by which chat templates turn reasoning on and off."""
Switch = tuple[str, bool]


class _AddedToken(msgspec.Struct):
    content: str
    special: bool = False


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """``dialect``: how tools are called, None if not at all. ``special``: names of special tokens.

    ``endings``: how a rendered prompt ends, by the switch that was set (None: by none); None: the model does not
    reason, or nobody is to know.
    """

    dialect: ToolCallFormat | None = None
    special: frozenset[str] = frozenset()
    endings: Mapping[Switch | None, ReasoningStart] | None = field(default=None)

    @classmethod
    def of(cls, launch: Launch) -> Self:
        """What the files of a launch's model and its options say."""
        files = read_tokenizer_files(launch.model.path, launch.model.tokenizer_path)
        config, template = launch.config, files.template or ""
        thinks = config.reasoning_parser == "think" or (
            config.reasoning_parser == "auto" and (reasoning.OPEN in template or reasoning.CLOSE in template)
        )
        return cls(
            dialect=select_tool_call_format(config.tool_call_parser, files.template),
            special=_special_tokens(files.tokenizer),
            endings=_endings(files) if thinks else None,
        )

    def thinking(self, prompt: ChatPrompt) -> ReasoningStart | None:
        """How the answer to a prompt begins; None where reasoning is not looked for."""
        if self.endings is None:
            return None
        if prompt.continue_final_message:
            text = str(prompt.messages[-1].get("content"))
            return (
                ReasoningStart.OPENED
                if text.rfind(reasoning.OPEN) > text.rfind(reasoning.CLOSE)
                else ReasoningStart.CLOSED
            )
        if not prompt.add_generation_prompt:
            return ReasoningStart.FREE
        for name in SWITCHES:
            value = prompt.template_options.get(name)
            if isinstance(value, bool):
                return self.endings[name, value]
        return self.endings[None]


def _special_tokens(path: Path) -> frozenset[str]:
    try:
        tokens = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path} cannot be read as a tokenizer: {error}") from None
    return frozenset(token.content for token in tokens if token.special)


def _endings(files: TokenizerFiles) -> dict[Switch | None, ReasoningStart]:
    # Imported here because jinja2 takes 2 MiB, which the server of a model without reasoning saves.
    from skiff_runtime.vocabulary.chat_template import ChatTemplate

    template = ChatTemplate(files.template, files.special_tokens)
    switches: list[Switch | None] = [None, *((name, value) for name in SWITCHES for value in (False, True))]
    return {switch: _ending(template.render, switch) for switch in switches}


def _ending(render: Callable[[ChatPrompt], str], switch: Switch | None) -> ReasoningStart:
    options = {} if switch is None else {switch[0]: switch[1]}
    try:
        text = render(ChatPrompt([{"role": "user", "content": "-"}], template_options=options))
    except InvalidRequest:
        return ReasoningStart.FREE
    return detect_reasoning_start(text)
