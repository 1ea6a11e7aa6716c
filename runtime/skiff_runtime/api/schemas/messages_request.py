"""Request bodies of Anthropic's Messages API as pydantic models.

Every field of Anthropic's specification is declared here, those of its beta included. A field is served, accepted as a
hint because it cannot change the answer of this server, or refused by name (``field_support``). docs/api.md has the
table.

The docstrings of these classes are descriptions in the OpenAPI document.
"""

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError

from skiff_runtime.api.schemas.field_support import Hint, Refused
from skiff_runtime.api.schemas.request_bodies import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_PRIORITY,
    MAX_SALT_CHARACTERS,
    ChatTemplateKwargs,
    FunctionDefinition,
    FunctionTool,
    NamedFunction,
    NamedToolChoice,
    SamplingFields,
    StopString,
    StrictModel,
    ToolFields,
)
from skiff_runtime.config.limits import MAX_OUTPUT_TOKENS, MAX_STOP_STRINGS, MIN_P, SEED, TOP_K, TOP_P

MAX_MESSAGES_TOOLS: Final = 512
"""More than the chat endpoint accepts: an agent with several MCP servers sends hundreds."""
MAX_SYSTEM_BLOCKS: Final = 256
MAX_CONTEXT_EDITS: Final = 16
MAX_TEMPERATURE: Final = 1.0
DIRECT_CALLER: Final = "direct"

_UNSUPPORTED_BLOCKS: Final = {
    "image": "this server reads text only; describe the image in a text block",
    "document": "this server reads text only; send the document's text in a text block",
    "search_result": "send its text in a text block",
    "tool_reference": "send the tools themselves in 'tools'",
    "container_upload": "no code is executed here",
    "browser_state": "send its text in a text block",
}
"""Types of content blocks that Anthropic's API has and this server has not. Results of Anthropic's server tools are
recognized by the ends of their names."""
_SERVER_TOOL_BLOCKS: Final = ("server_tool_use", "mcp_tool_use")
_SERVER_TOOL_RESULT: Final = "_tool_result"

IgnoredObject = Annotated[dict[str, JsonValue] | None, Hint("remove it")]
"""An object without effect here, such as ``cache_control``: prefixes are cached without marks."""
IgnoredText = Annotated[Annotated[str, Field(max_length=512)] | None, Hint("remove it")]


def _type_of(value: Any) -> Any:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _refuse_unsupported_block(value: Any) -> Any:
    """Raise the error of a content block that is not supported; return every other value unchanged."""
    kind = _type_of(value)
    if not isinstance(kind, str):
        return value
    advice = _UNSUPPORTED_BLOCKS.get(kind)
    if kind in _SERVER_TOOL_BLOCKS or (kind.endswith(_SERVER_TOOL_RESULT) and kind != "tool_result"):
        advice = "tools of Anthropic's servers do not run here; remove it, or send its text in a text block"
    if advice is not None:
        raise PydanticCustomError(
            "unsupported_block",
            "content blocks of the type '{kind}' are not supported: " + advice,
            {"kind": kind[:60]},
        )
    return value


def _tag(kind: str) -> Tag:
    """Return the tag of a union's branch. The bracket makes `_simplify_path` drop it from error paths."""
    return Tag(f"block[{kind}]")


def _tag_of(*kinds: str) -> Callable[[Any], str | None]:
    tags = {kind: f"block[{kind}]" for kind in kinds}

    def find_tag(value: Any) -> str | None:
        kind = _type_of(value)
        return tags.get(kind) if isinstance(kind, str) else None

    return find_tag


def _discriminator(*kinds: str) -> Discriminator:
    names = ", ".join(f"'{kind}'" for kind in kinds)
    return Discriminator(
        _tag_of(*kinds),
        custom_error_type="block_type",
        custom_error_message=f"must be an object with one of the types {names}",
    )


# Content blocks


class TextBlock(StrictModel):
    """Text. `cache_control` and `citations` have no effect."""

    type: Literal["text"]
    text: str
    cache_control: IgnoredObject = None
    citations: Annotated[list[JsonValue] | None, Hint("remove it", off=(None, []))] = None


class ThinkingBlock(StrictModel):
    """Reasoning of an earlier answer. `signature` is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(StrictModel):
    """Encrypted reasoning of another server's answer, which cannot be read here and is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(StrictModel):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    input: dict[str, JsonValue]
    cache_control: IgnoredObject = None
    caller: IgnoredObject = None
    toolset_name: Annotated[None, Refused("remove it; toolsets run on Anthropic's servers only")] = None

    def to_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.input}}


_TextOnly = Annotated[TextBlock, BeforeValidator(_refuse_unsupported_block)]
_TextBlocks = Annotated[list[_TextOnly], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)]


def _as_blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ToolResultBlock(StrictModel):
    """The result of a tool call. With `is_error`, the model reads it after the word "Error:"."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: Annotated[
        _TextBlocks | None, BeforeValidator(_as_blocks, json_schema_input_type=str | _TextBlocks | None)
    ] = None
    is_error: bool | None = None
    cache_control: IgnoredObject = None
    toolset_name: Annotated[None, Refused("remove it; toolsets run on Anthropic's servers only")] = None

    def to_template(self) -> dict[str, Any]:
        """Return the result as chat templates expect it."""
        text = join_texts([block.text for block in self.content or ()])
        return {
            "role": "tool",
            "content": f"Error: {text}" if self.is_error else text,
            "tool_call_id": self.tool_use_id,
        }


ContentBlock = Annotated[
    Annotated[TextBlock, _tag("text")]
    | Annotated[ThinkingBlock, _tag("thinking")]
    | Annotated[RedactedThinkingBlock, _tag("redacted_thinking")]
    | Annotated[ToolUseBlock, _tag("tool_use")]
    | Annotated[ToolResultBlock, _tag("tool_result")],
    _discriminator("text", "thinking", "redacted_thinking", "tool_use", "tool_result"),
    BeforeValidator(_refuse_unsupported_block),
]
ContentBlocks = Annotated[list[ContentBlock], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)]


def join_texts(texts: list[str]) -> str:
    """Join the texts of several blocks into one, each a paragraph of its own."""
    return "\n\n".join(text for text in texts if text)


class MessageParam(StrictModel):
    """A turn of the conversation. Consecutive turns of one role are combined.

    Tool results belong into a user's turn; thinking and tool calls into an assistant's. A system's turn has text alone.
    """

    role: Literal["user", "assistant", "system"]
    content: Annotated[ContentBlocks, BeforeValidator(_as_blocks, json_schema_input_type=str | ContentBlocks)]

    @property
    def ends_with_text(self) -> bool:
        """True if the last block is text that an answer can continue."""
        last = self.content[-1] if self.content else None
        return isinstance(last, TextBlock) and bool(last.text.strip())

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        if self.role == "user" and not self.content:
            raise PydanticCustomError("content", 'a message with the role "user" needs content')
        for block in self.content:
            allowed = isinstance(block, TextBlock)
            if self.role == "user":
                allowed = allowed or isinstance(block, ToolResultBlock)
            elif self.role == "assistant":
                allowed = not isinstance(block, ToolResultBlock)
            if not allowed:
                raise PydanticCustomError(
                    "content", f"a message with the role \"{self.role}\" has no '{block.type}' blocks"
                )
        return self


# Tools


class CustomTool(StrictModel):
    """A tool that the client runs. `input_examples` are shown to the model with the description."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")]
    input_schema: dict[str, JsonValue]
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    input_examples: Annotated[list[dict[str, JsonValue]], Field(max_length=64)] | None = None
    allowed_callers: Annotated[list[str], Field(max_length=16)] | None = None
    cache_control: IgnoredObject = None
    defer_loading: Annotated[
        bool | None, Hint("remove it; every tool is offered at once", off=(None, False))
    ] = None
    eager_input_streaming: Annotated[bool | None, Hint("remove it", off=(None, False))] = None

    @model_validator(mode="after")
    def _check_caller(self) -> Self:
        if self.allowed_callers is not None and DIRECT_CALLER not in self.allowed_callers:
            raise PydanticCustomError(
                "allowed_callers", "'allowed_callers' must contain \"direct\": no code is executed here"
            )
        return self

    def to_function(self) -> FunctionTool:
        """Return the tool as the chat endpoint represents it."""
        description = self.description
        if self.input_examples:
            examples = "\n".join(json.dumps(each, ensure_ascii=False) for each in self.input_examples)
            description = join_texts([description or "", f"Examples of the input:\n{examples}"])
        function = FunctionDefinition.model_construct(
            name=self.name, description=description, parameters=self.input_schema, strict=self.strict
        )
        return FunctionTool.model_construct(type="function", function=function)


def _refuse_server_tool(value: Any) -> Any:
    """Raise the error of a tool that Anthropic defines; return every other value unchanged."""
    kind = _type_of(value)
    if isinstance(kind, str) and kind != "custom":
        raise PydanticCustomError(
            "unsupported_tool",
            "tools of the type '{kind}' are not supported: Anthropic's own tools are not known to this server; define it "
            "with a name and an 'input_schema', and run it in the client",
            {"kind": kind[:60]},
        )
    return value


Tools = Annotated[
    list[Annotated[CustomTool, BeforeValidator(_refuse_server_tool)]],
    Field(max_length=MAX_MESSAGES_TOOLS, fail_fast=True),
]


class AutoToolChoice(StrictModel):
    """The model decides whether it calls tools."""

    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = None


class AnyToolChoice(StrictModel):
    """The model must call a tool."""

    type: Literal["any"]
    disable_parallel_tool_use: bool | None = None


class NamedTool(StrictModel):
    """The model must call this tool."""

    type: Literal["tool"]
    name: Annotated[str, Field(min_length=1, max_length=128)]
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(StrictModel):
    """The model calls no tool."""

    type: Literal["none"]


ToolChoice = Annotated[
    Annotated[AutoToolChoice, _tag("auto")]
    | Annotated[AnyToolChoice, _tag("any")]
    | Annotated[NamedTool, _tag("tool")]
    | Annotated[NoToolChoice, _tag("none")],
    _discriminator("auto", "any", "tool", "none"),
]


# Thinking and output

ThinkingDisplay = Literal["summarized", "omitted", "updates"]


class ThinkingEnabled(StrictModel):
    """The model reasons first. `budget_tokens` is a hint; `display` "omitted" leaves the text of the reasoning out."""

    type: Literal["enabled"]
    budget_tokens: Annotated[
        Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS)] | None, Hint("remove it; use 'max_tokens'")
    ] = None
    display: ThinkingDisplay | None = None
    block_binding: IgnoredObject = None


class ThinkingAdaptive(StrictModel):
    """The model may reason first, as with "enabled"."""

    type: Literal["adaptive", "between_tools"]
    display: ThinkingDisplay | None = None
    block_binding: IgnoredObject = None


class ThinkingDisabled(StrictModel):
    """The model does not reason first, if its chat template can turn reasoning off."""

    type: Literal["disabled"]


Thinking = Annotated[
    Annotated[ThinkingEnabled, _tag("enabled")]
    | Annotated[ThinkingAdaptive, _tag("adaptive")]
    | Annotated[ThinkingAdaptive, _tag("between_tools")]
    | Annotated[ThinkingDisabled, _tag("disabled")],
    _discriminator("enabled", "adaptive", "between_tools", "disabled"),
]


class JsonOutputFormat(StrictModel):
    """JSON that matches a schema, enforced by a grammar."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, JsonValue], Field(alias="schema")]


class OutputConfig(StrictModel):
    """`effort` means what `reasoning_effort` means on the chat endpoint; `task_budget` is a hint."""

    effort: Annotated[
        Literal["low", "medium", "high", "xhigh", "max"] | None, Hint("use 'chat_template_kwargs'")
    ] = None
    format: JsonOutputFormat | None = None
    task_budget: IgnoredObject = None


class ContextManagement(StrictModel):
    """Accepted as a hint: nothing is removed from the conversation here."""

    edits: Annotated[list[dict[str, JsonValue]], Field(max_length=MAX_CONTEXT_EDITS)] | None = None


class Metadata(StrictModel):
    """`user_id` is written to the log."""

    user_id: Annotated[str, Field(max_length=512)] | None = None


# The two endpoints

_TOOL_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's words for the choice among the tools, and OpenAI's."""


class MessagesPromptFields(StrictModel):
    """The fields that determine the prompt, on both endpoints. `chat_template_kwargs` is an extension."""

    expected_types: ClassVar[Mapping[str, str]] = {
        "content": "must be a string or a list of content blocks",
        "system": "must be a string or a list of text blocks",
    }

    model: Annotated[str, Field(min_length=1, max_length=512)]
    messages: Annotated[list[MessageParam], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Annotated[
        Annotated[list[_TextOnly], Field(max_length=MAX_SYSTEM_BLOCKS, fail_fast=True)] | None,
        BeforeValidator(
            _as_blocks,
            json_schema_input_type=str
            | Annotated[list[TextBlock], Field(max_length=MAX_SYSTEM_BLOCKS)]
            | None,
        ),
    ] = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonOutputFormat | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None

    cache_control: IgnoredObject = None
    context_management: Annotated[
        ContextManagement | None, Hint("remove it; shorten the conversation in the client")
    ] = None
    speed: Annotated[Literal["standard", "fast"] | None, Hint("remove it")] = None
    user_profile_id: IgnoredText = None
    workspace_id: IgnoredText = None

    billing_policy: Annotated[None, Refused("remove it; nothing is billed")] = None
    compaction: Annotated[None, Refused("remove it; shorten the conversation in the client")] = None
    mcp_servers: Annotated[
        Annotated[list[Any], Field(max_length=0)] | None,
        Refused("remove it; connect to MCP servers in the client, and send their tools in 'tools'"),
    ] = None

    @property
    def continues_final_message(self) -> bool:
        """True if the answer continues the last message, which is the assistant's."""
        return self.messages[-1].role == "assistant"

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "two of the 'tools' have the same name; names must be unique")
        if isinstance(self.tool_choice, AnyToolChoice | NamedTool) and not names:
            raise PydanticCustomError("tool_choice", "'tool_choice' needs 'tools' to choose from")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.name not in names:
            raise PydanticCustomError(
                "tool_choice", "'tool_choice' names a tool that is not among the 'tools'"
            )
        if all(message.role == "system" for message in self.messages):
            raise PydanticCustomError("messages", "'messages' needs a message with the role \"user\"")
        if self.continues_final_message and not self.messages[-1].ends_with_text:
            raise PydanticCustomError(
                "messages",
                "the last message is the assistant's, which the answer would continue, but it ends without text; end with "
                'a message with the role "user", such as the results of its tool calls',
            )
        if self.output_format is not None and self.output_config is not None and self.output_config.format:
            raise PydanticCustomError(
                "output_format",
                "'output_format' and 'output_config.format' are the same; send only the latter",
            )
        return self

    def tool_fields(self) -> ToolFields:
        """Return the tools and the choice among them as the chat endpoint represents them."""
        parallel, choice = True, self.tool_choice
        chosen: str | NamedToolChoice = "auto"
        if isinstance(choice, NamedTool):
            function = NamedFunction.model_construct(name=choice.name)
            chosen = NamedToolChoice.model_construct(type="function", function=function)
        elif choice is not None:
            chosen = _TOOL_CHOICES[choice.type]
        if choice is not None and not isinstance(choice, NoToolChoice):
            parallel = not choice.disable_parallel_tool_use
        return ToolFields.model_construct(
            tools=[tool.to_function() for tool in self.tools or ()] or None,
            tool_choice=chosen,
            parallel_tool_calls=parallel,
        )

    @property
    def output_schema(self) -> dict[str, JsonValue] | None:
        """The JSON Schema that the answer must match, None for any text."""
        configured = None if self.output_config is None else self.output_config.format
        chosen = configured or self.output_format
        return None if chosen is None else chosen.json_schema


class CountTokensRequest(MessagesPromptFields):
    """The body of POST /v1/messages/count_tokens."""


class MessagesRequest(MessagesPromptFields):
    """The body of POST /v1/messages. `min_p`, `seed`, `priority` and `cache_salt` are extensions."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS)]
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None = (
        None
    )
    temperature: Annotated[float, Field(ge=0.0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=TOP_P.low, le=TOP_P.high)] | None = None
    top_k: Annotated[int, Field(ge=TOP_K.low, le=TOP_K.high)] | None = None
    min_p: Annotated[float, Field(ge=MIN_P.low, le=MIN_P.high)] | None = None
    seed: Annotated[int, Field(ge=SEED.low, le=SEED.high)] | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    metadata: Metadata | None = None

    diagnostics: IgnoredObject = None
    service_tier: Annotated[Literal["auto", "standard_only"] | None, Hint("remove it; use 'priority'")] = None

    container: Annotated[None, Refused("remove it; no code is executed here")] = None
    fallback_credit_token: Annotated[None, Refused("remove it")] = None
    fallbacks: Annotated[
        Annotated[list[Any], Field(max_length=0)] | None, Refused("remove it; one model is served here")
    ] = None
    inference_geo: Annotated[None, Refused("remove it; the service runs where it was deployed")] = None
    thread: Annotated[
        None, Refused("remove it; nothing is stored, so send the whole conversation in 'messages'")
    ] = None

    def sampling_fields(self) -> SamplingFields:
        """Return the sampling parameters as the chat endpoint represents them."""
        return SamplingFields.model_construct(
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=self.stop_sequences,
        )
