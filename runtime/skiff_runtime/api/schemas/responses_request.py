"""The body of POST /v1/responses as pydantic models: input items, tools, and every field of OpenAI's specification.

A field that cannot change the answer is accepted, whatever its value. A field that changes the answer and is not served
accepts only the values that change nothing, and any other is rejected by name (``field_support``).

The docstrings of these classes are descriptions in the OpenAPI document.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError

from skiff_runtime.api.schemas.field_support import Hint, Refused
from skiff_runtime.api.schemas.request_bodies import (
    MAX_ARGUMENT_CHARACTERS,
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatTemplateKwargs,
    FunctionName,
    JsonObjectFormat,
    JsonSchema,
    NullOrEmpty,
    NumLogprobs,
    SamplingFields,
    StrictModel,
    TextFormat,
    TokenLimit,
    ToolCallId,
)

MAX_METADATA: Final = 16
MAX_INCLUDES: Final = 32
LOGPROBS_INCLUDE: Final = "message.output_text.logprobs"

ItemId = Annotated[str, Field(min_length=1, max_length=256)]
Status = Annotated[str, Field(max_length=32)]
Ignored = Annotated[
    JsonValue,
    Hint("remove it", off=(None, False, [], {})),
    Field(description="Accepted, and without effect."),
]
Kind = Callable[[Any], str | None]


def _kind_of(tags: dict[str, str], default: Callable[[dict[str, Any]], str | None] | None = None) -> Kind:
    """Return a discriminator from the ``type`` of an object, or of a model, to the tag of its class.

    The tags contain a bracket, so that they are left out of the paths in error messages.
    """

    def find(value: Any) -> str | None:
        if not isinstance(value, dict):
            return tags.get(getattr(value, "type", None) or "")
        kind = value.get("type")
        if kind is None and default is not None:
            kind = default(value)
        return tags.get(kind) if isinstance(kind, str) else None

    return find


def _tags(*kinds: str) -> dict[str, str]:
    return {kind: f"[{kind}]" for kind in kinds}


# Content


class ResponseTextPart(StrictModel):
    """A text part of a message or of a tool's output. The other fields of an earlier answer's parts have no effect."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    parsed: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class RefusalPart(StrictModel):
    """A refusal in an earlier answer."""

    type: Literal["refusal"]
    refusal: str


_TEXT_PARTS: Final = dict.fromkeys(("input_text", "output_text", "text"), "[text]")
ContentPart = Annotated[
    Annotated[ResponseTextPart, Tag("[text]")] | Annotated[RefusalPart, Tag("[refusal]")],
    Discriminator(
        _kind_of({**_TEXT_PARTS, "refusal": "[refusal]"}),
        custom_error_type="content_part",
        custom_error_message="must be a part of type input_text, output_text or refusal; images, files and audio are "
        "not supported",
    ),
]


def _as_text_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


ContentParts = Annotated[list[ContentPart], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)]
Content = Annotated[ContentParts, BeforeValidator(_as_text_parts, json_schema_input_type=str | ContentParts)]


# Input items


class MessageItem(StrictModel):
    """A message of the conversation, whose content is a string or a list of text parts."""

    type: Literal["message"] | None = None
    id: ItemId | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    status: Status | None = None
    phase: Ignored = None


class FunctionCallItem(StrictModel):
    """An earlier call of a function. `arguments` is a JSON object as text."""

    type: Literal["function_call"]
    id: ItemId | None = None
    call_id: ToolCallId
    name: FunctionName
    namespace: FunctionName | None = None
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENT_CHARACTERS)]
    status: Status | None = None
    async_: Annotated[Ignored, Field(alias="async")] = None
    caller: Ignored = None
    created_by: Ignored = None


class FunctionCallOutputItem(StrictModel):
    """The result of a function call: a string or a list of text parts."""

    type: Literal["function_call_output"]
    id: ItemId | None = None
    call_id: ToolCallId
    output: Content
    name: FunctionName | None = None
    namespace: FunctionName | None = None
    status: Status | None = None
    caller: Ignored = None
    created_by: Ignored = None


class CustomToolCallItem(StrictModel):
    """An earlier call of a custom tool, whose `input` is any text."""

    type: Literal["custom_tool_call"]
    id: ItemId | None = None
    call_id: ToolCallId
    name: FunctionName
    namespace: FunctionName | None = None
    input: Annotated[str, Field(max_length=MAX_ARGUMENT_CHARACTERS)]
    status: Status | None = None
    async_: Annotated[Ignored, Field(alias="async")] = None
    caller: Ignored = None
    created_by: Ignored = None


class CustomToolCallOutputItem(StrictModel):
    """The result of a custom tool's call: a string or a list of text parts."""

    type: Literal["custom_tool_call_output"]
    id: ItemId | None = None
    call_id: ToolCallId
    output: Content
    name: FunctionName | None = None
    status: Status | None = None
    caller: Ignored = None
    created_by: Ignored = None


class SummaryPart(StrictModel):
    """A part of a reasoning item's summary."""

    type: Literal["summary_text"]
    text: str


class ReasoningPart(StrictModel):
    """A part of a reasoning item's text."""

    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(StrictModel):
    """Reasoning of an earlier answer. Its text, otherwise its summary, goes to the chat template."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: Annotated[list[SummaryPart], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)] | None = None
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)] | None = None
    encrypted_content: Ignored = None
    status: Status | None = None


class ItemReference(StrictModel):
    """A reference to an item of a stored response."""

    type: Literal["item_reference"] | None = None
    id: ItemId


_ITEM_KINDS: Final = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
    "item_reference",
)


def _default_item_kind(value: dict[str, Any]) -> str | None:
    if "role" in value:
        return "message"
    return "item_reference" if "id" in value else None


InputItem = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[FunctionCallItem, Tag("[function_call]")]
    | Annotated[FunctionCallOutputItem, Tag("[function_call_output]")]
    | Annotated[CustomToolCallItem, Tag("[custom_tool_call]")]
    | Annotated[CustomToolCallOutputItem, Tag("[custom_tool_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[ItemReference, Tag("[item_reference]")],
    Discriminator(
        _kind_of(_tags(*_ITEM_KINDS), _default_item_kind),
        custom_error_type="input_item",
        custom_error_message=f"must be an item of one of the types {', '.join(_ITEM_KINDS)}; remove other items",
    ),
]


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


InputItems = Annotated[list[InputItem], Field(max_length=MAX_MESSAGES, fail_fast=True)]


# Tools


class ResponsesFunctionTool(StrictModel):
    """A function that the model may call. `parameters` is the JSON Schema of its arguments; without it there are none.

    A function with `defer_loading` is offered at once, because there is no tool search.
    """

    type: Literal["function"]
    name: FunctionName
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None
    allowed_callers: Ignored = None
    defer_loading: Ignored = None
    output_schema: Ignored = None


class CustomToolTextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class CustomTool(StrictModel):
    """A tool whose input is any text. The model calls it as a function with the one argument `input`."""

    type: Literal["custom"]
    name: FunctionName
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    format: CustomToolTextFormat | None = None
    async_: Annotated[Literal[False] | None, Field(alias="async")] = None
    allowed_callers: Ignored = None
    defer_loading: Ignored = None


class NamespaceTool(StrictModel):
    """Tools with a common namespace, which the model sees as `NAMESPACE__NAME`."""

    type: Literal["namespace"]
    name: FunctionName
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    tools: Annotated[
        list[
            Annotated[
                Annotated[ResponsesFunctionTool, Tag("[function]")] | Annotated[CustomTool, Tag("[custom]")],
                Discriminator(
                    _kind_of(_tags("function", "custom")),
                    custom_error_type="tool",
                    custom_error_message="must be a tool of type function or custom",
                ),
            ]
        ],
        Field(max_length=MAX_TOOLS, fail_fast=True),
    ]


class WebSearchTool(StrictModel):
    """Web search, which some clients always offer. It is accepted, and not offered to the model.

    Its other fields are not checked.
    """

    model_config = ConfigDict(extra="ignore")

    type: Annotated[
        str, Field(pattern=r"^web_search"), Hint("remove it; this server runs no tools itself", off=())
    ]


_WEB_SEARCH: Final = (
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
)
ResponsesTool = Annotated[
    Annotated[ResponsesFunctionTool, Tag("[function]")]
    | Annotated[CustomTool, Tag("[custom]")]
    | Annotated[NamespaceTool, Tag("[namespace]")]
    | Annotated[WebSearchTool, Tag("[web_search]")],
    Discriminator(
        _kind_of({**_tags("function", "custom", "namespace"), **dict.fromkeys(_WEB_SEARCH, "[web_search]")}),
        custom_error_type="tool",
        custom_error_message="must be a tool of type function, custom or namespace, whose calls the client runs; this "
        "server runs no tools itself",
    ),
]


class AllowedTool(StrictModel):
    """A reference to one of the `tools`."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, Field(max_length=64)]
    name: FunctionName | None = None
    namespace: FunctionName | None = None


class AllowedTools(StrictModel):
    """Restricts the model to some of the `tools`. It may (`auto`) or must (`required`) call one of these."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class NamedTool(StrictModel):
    """The one tool that the model must call."""

    type: Literal["function", "custom"]
    name: FunctionName
    namespace: FunctionName | None = None


def _tool_choice_kind(value: Any) -> str | None:
    return "[mode]" if isinstance(value, str) else _TOOL_CHOICE_OBJECTS(value)


_TOOL_CHOICE_OBJECTS: Final = _kind_of(
    {"allowed_tools": "[allowed_tools]", "function": "[named]", "custom": "[named]"}
)
ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[mode]")]
    | Annotated[AllowedTools, Tag("[allowed_tools]")]
    | Annotated[NamedTool, Tag("[named]")],
    Discriminator(
        _tool_choice_kind,
        custom_error_type="tool_choice",
        custom_error_message='must be "none", "auto", "required", or an object of type function, custom or '
        "allowed_tools; this server runs no tools itself",
    ),
]


# Output


class ResponsesJsonSchemaFormat(StrictModel):
    """JSON that matches a schema. `strict` has no effect: every schema is enforced."""

    type: Literal["json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    json_schema: Annotated[JsonSchema, Field(alias="schema")]
    description: Annotated[str, Field(max_length=4096)] | None = None
    strict: bool | None = None


class TextConfig(StrictModel):
    """The format of the text, and its `verbosity`, a variable of the chat template."""

    format: (
        Annotated[
            Annotated[TextFormat, Tag("[text]")]
            | Annotated[JsonObjectFormat, Tag("[json_object]")]
            | Annotated[ResponsesJsonSchemaFormat, Tag("[json_schema]")],
            Discriminator(
                _kind_of(_tags("text", "json_object", "json_schema")),
                custom_error_type="text_format",
                custom_error_message="must be a format of type text, json_object or json_schema",
            ),
        ]
        | None
    ) = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, Hint('use "medium"', off=(None, "medium"))
    ] = None


class ReasoningConfig(StrictModel):
    """`effort` is a variable of the chat template; "none" turns reasoning off where the template can.

    Reasoning is returned as it is, so a `summary` has no effect.
    """

    effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Hint("use 'chat_template_kwargs'"),
    ] = None
    summary: Annotated[
        Literal["auto", "concise", "detailed", "none"] | None, Hint("remove it", off=(None, "none"))
    ] = None
    generate_summary: Annotated[Literal["auto", "concise", "detailed"] | None, Hint("remove it")] = None
    context: Ignored = None
    mode: Annotated[Literal["standard"] | None, Refused('remove it, or use "standard"')] = None


class ResponsesStreamOptions(StrictModel):
    """Options of a stream."""

    include_obfuscation: Annotated[Literal[False] | None, Refused("use false")] = None


class ResponsesRequest(SamplingFields):
    """The body of POST /v1/responses."""

    expected_types: ClassVar[Mapping[str, str]] = {
        "content": "must be a string or a list of text parts",
        "input": "must be a string or a list of items",
        "output": "must be a string or a list of text parts",
        "stop": "must be a string or a list of strings",
    }

    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Annotated[
        InputItems,
        BeforeValidator(_as_items, json_schema_input_type=str | InputItems),
    ]
    instructions: str | None = None
    max_output_tokens_: Annotated[TokenLimit | None, Field(alias="max_output_tokens")] = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    top_logprobs: NumLogprobs | None = None
    include: (
        Annotated[
            list[
                Annotated[
                    str,
                    Field(max_length=128),
                    Hint("remove it; this server has no such output", off=(LOGPROBS_INCLUDE,)),
                ]
            ],
            Field(max_length=MAX_INCLUDES, fail_fast=True),
        ]
        | None
    ) = None
    previous_response_id: ItemId | None = None
    store: bool | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None

    client_metadata: Ignored = None
    max_tool_calls: Annotated[
        Annotated[int, Field(ge=0)] | None, Hint("remove it; the client runs all tools")
    ] = None
    prompt_cache_key: Annotated[
        Annotated[str, Field(max_length=512)] | None, Hint("remove it; prefixes are cached without it")
    ] = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Annotated[Annotated[str, Field(max_length=512)] | None, Hint("use 'user'")] = None
    service_tier: Annotated[
        Annotated[str, Field(max_length=64)] | None,
        Hint("remove it; use 'priority'", off=(None, "auto", "default")),
    ] = None

    access_programs: Annotated[None, Refused("remove it")] = None
    background: Annotated[
        Literal[False] | None, Refused("use false; requests run while the client is connected")
    ] = None
    background_options: Annotated[None, Refused("remove it; requests run while the client is connected")] = (
        None
    )
    context_management: Annotated[NullOrEmpty, Refused("remove it; shorten the input instead")] = None
    conversation: Annotated[None, Refused("remove it; use 'previous_response_id'")] = None
    image: Annotated[None, Refused("remove it; only text is read")] = None
    max_tokens: Annotated[None, Refused("use 'max_output_tokens'")] = None
    moderation: Annotated[None, Refused("remove it; nothing is moderated")] = None
    return_token_ids: Annotated[
        Literal[False] | None, Refused("use the chat endpoint, which returns token ids")
    ] = None
    prompt: Annotated[
        None, Refused("remove it; send the text of the prompt as 'instructions' and 'input'")
    ] = None
    truncation: Annotated[
        Literal["disabled"] | None, Refused('use "disabled"; shorten the input instead')
    ] = None

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_output_tokens_

    @property
    def num_logprobs(self) -> int | None:
        """The number of top log-probabilities of each token of the text; None for no log-probabilities."""
        is_included = LOGPROBS_INCLUDE in (self.include or ())
        return self.top_logprobs or 0 if is_included or self.top_logprobs else None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "'stream_options' needs \"stream\": true")
        if not (self.input or self.instructions or self.previous_response_id):
            raise PydanticCustomError("input", "'input' is empty; send a string or a list of items")
        return self
