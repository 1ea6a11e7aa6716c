"""Request bodies of the API as pydantic models.

Every field of OpenAI's API is declared here, and the fields that clients of vLLM and SGLang send. A field that cannot
change the answer is marked as a ``Hint``. One that could, but is not served, is ``Refused``: it accepts only the values
that ask for nothing. Unknown fields are rejected too, so that no parameter is ignored silently.

The docstrings of these classes are descriptions in the OpenAPI document.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from skiff_runtime.api.schemas.field_support import STRICT, Hint, Refused, Support, hint_error, support_of
from skiff_runtime.api.schemas.json_object import parse_object
from skiff_runtime.config.limits import (
    LOGIT_BIAS,
    MAX_ALLOWED_TOKENS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_CHOICES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_OUTPUT_TOKENS,
    MAX_STOP_STRING_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MIN_P,
    PENALTY,
    REPETITION_PENALTY,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
)
from skiff_runtime.errors import InvalidRequest

MAX_GRAMMAR_CHARACTERS: Final = 256 << 10
MAX_GUIDED_CHOICES: Final = 1024
MAX_TOOLS: Final = 128
MAX_TOOL_CALLS: Final = 128
MAX_ARGUMENT_CHARACTERS: Final = 1 << 20
MAX_MESSAGES: Final = 4096
MAX_CONTENT_PARTS: Final = 1024
MAX_TOTAL_CHOICES: Final = 1024
"""Prompts of one request times the choices of each. The api process starts this many in a few milliseconds."""
MAX_PRIORITY: Final = 1000
MAX_SALT_CHARACTERS: Final = 256
MAX_CHAT_TEMPLATE_KWARGS: Final = 64
DEFAULT_COMPLETION_TOKENS: Final = 16
MAX_METADATA_PAIRS: Final = 16
MAX_HINT_FIELDS: Final = 64
"""Most members of an object that is accepted and not read."""


class StrictModel(BaseModel):
    """Base of every request body: no type coercion, no unknown field, no NaN or infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    expected_types: ClassVar[Mapping[str, str]] = {
        "content": "must be a string or a list of text parts",
        "prompt": "must be a string, a list of token ids, or a list of those",
        "stop": "must be a string or a list of strings",
    }
    """Fields of several types, and the types that they accept, for error messages."""


def exactly_one(*names: str) -> dict[str, Any]:
    """Return the JSON schema addition which requires that exactly one of the fields ``names`` is present and not null."""
    return {
        "oneOf": [{"required": [name], "properties": {name: {"not": {"type": "null"}}}} for name in names]
    }


def _accept_one(kind: type) -> Callable[[Any], Any]:
    """Return a validator that turns a single ``kind`` into a list with this one item."""

    def as_list(value: Any) -> Any:
        return [value] if isinstance(value, kind) else value

    return as_list


# Structured outputs

JsonSchema = Annotated[dict[str, JsonValue], Field(description="A JSON Schema (draft 2020-12).")]
GrammarSource = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)]


class TextFormat(StrictModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(StrictModel):
    """Any JSON object."""

    type: Literal["json_object"]


class NamedSchema(StrictModel):
    """A JSON Schema with a name. `strict` has no effect: every schema is enforced."""

    name: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: Annotated[str, Field(max_length=4096)] | None = None
    json_schema: Annotated[JsonSchema, Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(StrictModel):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema


class TaggedStructure(StrictModel):
    """Text that begins with `begin` and ends with `end`, with JSON of a schema between them."""

    begin: Annotated[str, Field(min_length=1, max_length=4096)]
    json_schema: Annotated[JsonSchema | bool, Field(alias="schema")]
    end: Annotated[str, Field(max_length=4096)]


class StructuralTagFormat(StrictModel):
    """Text with tagged parts: either `format`, in xgrammar's language, or `structures` that `triggers` begin."""

    model_config = ConfigDict(json_schema_extra=exactly_one("format", "structures"))

    type: Literal["structural_tag"]
    format: dict[str, JsonValue] | None = None
    structures: Annotated[list[TaggedStructure], Field(min_length=1, max_length=MAX_TOOLS)] | None = None
    triggers: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=4096)]],
            Field(min_length=1, max_length=MAX_TOOLS),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _check_form(self) -> Self:
        if (self.format is None) == (self.structures is None) or (self.structures is None) != (
            self.triggers is None
        ):
            raise PydanticCustomError(
                "structural_tag", "a structural tag has either 'format', or 'structures' and 'triggers'"
            )
        return self


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, Field(discriminator="type")
]

GuidedChoice = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]],
    Field(min_length=1, max_length=MAX_GUIDED_CHOICES, fail_fast=True),
]


class StructuredOutputs(StrictModel):
    """vLLM's constraints on the output. A request gives exactly one of them."""

    json_value: Annotated[JsonSchema | GrammarSource | None, Field(alias="json")] = None
    regex: GrammarSource | None = None
    choice: GuidedChoice | None = None
    grammar: GrammarSource | None = None
    json_object: bool | None = None
    structural_tag: GrammarSource | StructuralTagFormat | None = None

    disable_fallback: Annotated[bool | None, Hint("remove it; there is one backend")] = None
    disable_any_whitespace: Annotated[
        Literal[False] | None, Refused("remove it; JSON may have whitespace")
    ] = None
    disable_additional_properties: Annotated[
        Literal[False] | None, Refused('write "additionalProperties": false into the schema')
    ] = None
    whitespace_pattern: Annotated[None, Refused("remove it; JSON may have whitespace")] = None

    @model_validator(mode="after")
    def _check_constraints(self) -> Self:
        if len(self.constraints()) != 1:
            raise PydanticCustomError(
                "structured_outputs",
                "'structured_outputs' needs exactly one of 'json', 'regex', 'choice', 'grammar', 'json_object' and "
                "'structural_tag'",
            )
        return self

    def constraints(self) -> dict[str, Any]:
        """Return the fields that constrain the output, by the name of the ``guided_`` field of the same meaning."""
        fields = {
            "guided_json": self.json_value,
            "guided_regex": self.regex,
            "guided_choice": self.choice,
            "guided_grammar": self.grammar,
            "json_object": self.json_object or None,
            "structural_tag": self.structural_tag,
        }
        return {name: value for name, value in fields.items() if value is not None}


class StructuredOutputFields(StrictModel):
    """Constraints on the output. A request may use one of them.

    `structured_outputs` and the older `guided_` fields have vLLM's names, `regex` and `ebnf` SGLang's.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | GrammarSource | None = None
    guided_regex: GrammarSource | None = None
    guided_choice: GuidedChoice | None = None
    guided_grammar: GrammarSource | None = None
    regex: GrammarSource | None = None
    ebnf: GrammarSource | None = None

    guided_decoding_backend: Annotated[
        Annotated[str, Field(max_length=64)] | None, Hint("remove it; there is one backend")
    ] = None
    guided_whitespace_pattern: Annotated[None, Refused("remove it; JSON may have whitespace")] = None

    def constraints(self) -> dict[str, Any]:
        """Return the fields that constrain the output, by name."""
        fields = {name: getattr(self, name) for name in _CONSTRAINTS}
        return {
            name: value
            for name, value in fields.items()
            if not (value is None or isinstance(value, TextFormat))
        }


_CONSTRAINTS: Final = tuple(
    name for name, field in StructuredOutputFields.model_fields.items() if support_of(field) is Support.SERVED
)


# The variables of a chat template

ChatTemplateKwargs = Annotated[
    dict[Annotated[str, Field(max_length=64)], JsonValue], Field(max_length=MAX_CHAT_TEMPLATE_KWARGS)
]


# Hints that messages, tools and bodies share

HintObject = dict[Annotated[str, Field(max_length=256)], JsonValue]
CacheControl = Annotated[
    Annotated[HintObject, Field(max_length=8)] | None,
    Hint("remove it; prefixes are cached without it"),
]
ParsedByClient = Annotated[JsonValue, Hint("remove it; it repeats the text beside it")]
"""Added by the helpers of OpenAI's client to an answer that is sent back."""
ProviderFields = Annotated[
    Annotated[HintObject, Field(max_length=MAX_HINT_FIELDS)] | None, Hint("remove it", off=(None, {}))
]


# Tools

FunctionName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
ToolCallId = Annotated[str, Field(min_length=1, max_length=256)]


class FunctionDefinition(StrictModel):
    """A function that the model may call. `parameters` is the JSON Schema of its arguments; without it there are none."""

    name: FunctionName
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class FunctionTool(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition
    cache_control: CacheControl = None

    def to_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it."""
        return {
            "type": "function",
            "function": self.function.model_dump(exclude_none=True, exclude={"strict"}),
        }


class NamedFunction(StrictModel):
    """A reference to a function by its name."""

    name: FunctionName


class NamedToolChoice(StrictModel):
    """The one function that the model must call."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(StrictModel):
    """A subset of the tools. With the mode "required" the model must call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedToolsChoice(StrictModel):
    """Restricts the request to some of its tools: the model is shown no others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class AssistantFunctionCall(StrictModel):
    """The function that an earlier message called. `arguments` is a JSON object as text; "" means no arguments.

    Text that is no JSON object is shown to the model as `{"arguments": TEXT}`.
    """

    name: FunctionName
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENT_CHARACTERS)]
    parsed_arguments: ParsedByClient = None
    provider_specific_fields: ProviderFields = None

    @model_validator(mode="after")
    def _check_arguments(self, info: ValidationInfo) -> Self:
        if info.context is STRICT and parse_object(self.arguments or "{}") is None:
            raise PydanticCustomError("arguments", "'arguments' must be a JSON object written as text")
        return self

    def parse_arguments(self) -> dict[str, Any]:
        """Return the arguments as an object, which is what chat templates expect."""
        value = parse_object(self.arguments or "{}")
        return {"arguments": self.arguments} if value is None else value


class AssistantToolCall(StrictModel):
    """A tool call in an earlier message."""

    id: ToolCallId
    type: Literal["function"]
    function: AssistantFunctionCall
    index: Annotated[
        Annotated[int, Field(ge=0, lt=1 << 31)] | None, Hint("remove it; calls have an order")
    ] = None
    provider_specific_fields: ProviderFields = None

    def to_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it."""
        function = {"name": self.function.name, "arguments": self.function.parse_arguments()}
        return {"id": self.id, "type": "function", "function": function}


class ToolFields(StrictModel):
    """The tools that the model may call, and whether it must call one."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def offered_tools(self) -> list[FunctionTool]:
        """The tools that the model is shown and may call."""
        tools, choice = self.tools or [], self.tool_choice
        if choice == "none":
            return []
        if isinstance(choice, AllowedToolsChoice):
            allowed = {tool.function.name for tool in choice.allowed_tools.tools}
            return [tool for tool in tools if tool.function.name in allowed]
        return tools

    @property
    def requires_call(self) -> bool:
        """True if the model must call a tool."""
        choice = self.tool_choice
        if isinstance(choice, AllowedToolsChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedToolChoice)

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if self.tools is None and self.tool_choice is None:
            return self
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "two of the 'tools' have the same name; names must be unique")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise PydanticCustomError("tool_choice", "'tool_choice' needs 'tools' to choose from")
        chosen: list[NamedToolChoice] = []
        if isinstance(self.tool_choice, NamedToolChoice):
            chosen = [self.tool_choice]
        elif isinstance(self.tool_choice, AllowedToolsChoice):
            chosen = self.tool_choice.allowed_tools.tools
        if any(tool.function.name not in names for tool in chosen):
            raise PydanticCustomError(
                "tool_choice", "'tool_choice' names a function that is not among the 'tools'"
            )
        return self


# Chat messages

NullOrEmpty = (
    Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)] | None
)


class TextPart(StrictModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl = None


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ChatMessage(StrictModel):
    """A message of the conversation. `content` is a string or a list of text parts.

    An assistant's message needs no content; a tool's message names the call that it answers. An earlier response can be
    sent back as it came: its `refusal` stands for the content that it lacks, and `reasoning` is another name of
    `reasoning_content`. `name` reaches the chat template, which may show it to the model.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[list[TextPart], Field(min_length=1, max_length=MAX_CONTENT_PARTS, fail_fast=True)] | None,
        BeforeValidator(
            _as_parts,
            json_schema_input_type=str
            | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_CONTENT_PARTS)]
            | None,
        ),
    ] = None
    reasoning_content: str | None = None
    reasoning: Annotated[str | None, Hint("use 'reasoning_content'")] = None
    tool_calls: (
        Annotated[list[AssistantToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = None
    tool_call_id: ToolCallId | None = None

    name: Annotated[
        Annotated[str, Field(max_length=256)] | None,
        Hint("remove it from the message; write the name into its content"),
    ] = None
    refusal: Annotated[str | None, Hint("write it into the content")] = None
    annotations: Annotated[
        Annotated[list[JsonValue], Field(max_length=MAX_CONTENT_PARTS)] | NullOrEmpty,
        Hint("remove it", off=(None, [], {})),
    ] = None
    parsed: ParsedByClient = None
    provider_specific_fields: ProviderFields = None
    cache_control: CacheControl = None
    audio: Annotated[None, Refused("remove it; only text is read")] = None
    function_call: Annotated[None, Refused("remove it; use 'tool_calls'")] = None

    @model_validator(mode="after")
    def _check_role(self, info: ValidationInfo) -> Self:
        if self.role != "tool" and self.content is not None and self.model_fields_set <= _PLAIN_MESSAGE:
            return self
        if self.content is None and not self.tool_calls:
            if self.role != "assistant" or "content" not in self.model_fields_set:
                raise PydanticCustomError(
                    "content", "a message needs 'content', a string or a list of text parts"
                )
            if info.context is STRICT:
                raise hint_error('send the content, "" if there is none')
        if self.reasoning and self.reasoning_content and self.reasoning != self.reasoning_content:
            raise PydanticCustomError(
                "reasoning", "'reasoning' and 'reasoning_content' differ; send only the latter"
            )
        for field, role in _FIELDS_OF_ROLES:
            if getattr(self, field) and self.role != role:
                raise PydanticCustomError(
                    "role", f"'{field}' is only allowed in messages with the role \"{role}\""
                )
        if self.role == "tool" and not self.tool_call_id:
            raise PydanticCustomError("tool_call_id", "a message with the role \"tool\" needs 'tool_call_id'")
        return self

    def to_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": "".join(part.text for part in self.content or ()) or self.refusal or "",
        }
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        if self.name:
            message["name"] = self.name
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


_PLAIN_MESSAGE: Final = frozenset(("role", "content"))
_FIELDS_OF_ROLES: Final = (
    ("tool_calls", "assistant"),
    ("reasoning_content", "assistant"),
    ("reasoning", "assistant"),
    ("refusal", "assistant"),
    ("tool_call_id", "tool"),
)

# Sampling

TokenLimit = Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS)]
Penalty = Annotated[float, Field(ge=PENALTY.low, le=PENALTY.high)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
RequestId = Annotated[str, Field(min_length=1, max_length=256)]


class CommonSamplingFields(StrictModel):
    """Sampling parameters whose names OpenAI, vLLM and SGLang share."""

    temperature: Annotated[float, Field(ge=TEMPERATURE.low, le=TEMPERATURE.high)] | None = None
    top_p: Annotated[float, Field(gt=TOP_P.low, le=TOP_P.high)] | None = None
    top_k: Annotated[int, Field(ge=TOP_K.low, le=TOP_K.high)] | None = None
    min_p: Annotated[float, Field(ge=MIN_P.low, le=MIN_P.high)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[float, Field(gt=REPETITION_PENALTY.low, le=REPETITION_PENALTY.high)] | None
    ) = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=LOGIT_BIAS.low, le=LOGIT_BIAS.high)]],
            Field(max_length=MAX_LOGIT_BIASES),
        ]
        | None
    ) = None
    stop: Annotated[
        Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)] | None,
        BeforeValidator(
            _accept_one(str),
            json_schema_input_type=StopString
            | Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
            | None,
        ),
    ] = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Annotated[
        Literal[True] | None, Refused("remove it; special tokens are written as they are")
    ] = None


class SamplingFields(CommonSamplingFields):
    """Sampling parameters: OpenAI's, and extensions named as in vLLM."""

    max_tokens: TokenLimit | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    seed: Annotated[int, Field(ge=SEED.low, le=SEED.high)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS, fail_fast=True)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_OUTPUT_TOKENS)] | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    stream: bool | None = None

    @property
    def max_output_tokens(self) -> int | None:
        """The largest number of output tokens, or None without a limit."""
        return self.max_tokens

    @property
    def end_user(self) -> str | None:
        """The end user that the client names, for the log."""
        return self.user

    @model_validator(mode="after")
    def _check_min_tokens(self) -> Self:
        least, limit = self.min_tokens or 0, self.max_output_tokens
        if limit is not None and least > limit:
            raise PydanticCustomError(
                "min_tokens", f"'min_tokens' is {least}, but the output is limited to {limit} tokens"
            )
        if self.truncate_prompt_tokens == 0:
            raise PydanticCustomError(
                "truncate_prompt_tokens",
                "'truncate_prompt_tokens' must be at least 1, or -1 for as many as fit; a prompt cannot be empty",
            )
        return self


class StreamOptions(StrictModel):
    """`include_usage` adds a last event with the token counts; `continuous_usage_stats` adds them to every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] = False


# The three generation endpoints


class HintFields(StrictModel):
    """Fields of OpenAI's and vLLM's requests that do not change the answer, beside those that they share with others."""

    metadata: Annotated[
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA_PAIRS),
        ]
        | NullOrEmpty,
        Hint("remove it; nothing is stored", off=(None, {}, [])),
    ] = None
    store: Annotated[bool | None, Hint("use false; nothing is stored", off=(None, False))] = None
    service_tier: Annotated[
        Literal["auto", "default", "flex", "scale", "priority", "fast"] | None,
        Hint('use "auto"', off=(None, "auto", "default")),
    ] = None
    safety_identifier: Annotated[
        Annotated[str, Field(max_length=512)] | None, Hint("remove it; use 'user'")
    ] = None
    prompt_cache_key: Annotated[
        Annotated[str, Field(max_length=512)] | None, Hint("remove it; prefixes are found without it")
    ] = None
    prompt_cache_retention: Annotated[
        Literal["in_memory", "in-memory", "24h"] | None,
        Hint("remove it; prefixes are kept while there is room"),
    ] = None
    prompt_cache_options: Annotated[
        Annotated[HintObject, Field(max_length=8)] | None, Hint("remove it; prefixes are found without it")
    ] = None
    prediction: Annotated[
        Annotated[HintObject, Field(max_length=8)] | None, Hint("remove it; it could only save time")
    ] = None
    request_id: Annotated[RequestId | None, Hint("send the header X-Request-Id")] = None
    rid: Annotated[RequestId | None, Hint("send the header X-Request-Id")] = None
    use_beam_search: Annotated[Literal[False] | None, Refused("remove it; tokens are sampled")] = None
    length_penalty: Annotated[float | None, Hint("remove it; only beam search uses it", off=(None, 1))] = None


class OpenAIRequestFields(SamplingFields, StructuredOutputFields, HintFields):
    """The fields that both OpenAI endpoints share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Annotated[
        Literal[1] | None, Refused("use 1; ask for several with 'n' and choose among them")
    ] = None
    return_tokens_as_token_ids: Annotated[Literal[False] | None, Refused("use 'return_token_ids'")] = None
    logits_processors: Annotated[NullOrEmpty, Refused("use 'logit_bias', 'bad_words' or a grammar")] = None
    kv_transfer_params: Annotated[None, Refused("remove it; prompts are computed where they are sent")] = None
    vllm_xargs: Annotated[NullOrEmpty, Refused("remove it")] = None
    prompt_logprobs: NumLogprobs | None = None

    @property
    def end_user(self) -> str | None:
        return self.user or self.safety_identifier

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError(
                "prompt_logprobs",
                "'prompt_logprobs' are returned with a whole response only; remove 'stream'",
            )
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "'stream_options' needs \"stream\": true")
        return self


class ChatCompletionRequest(OpenAIRequestFields, ToolFields):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: ChatTemplateKwargs | None = None

    reasoning_effort: Annotated[
        Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None,
        Hint("use 'chat_template_kwargs'"),
    ] = None
    verbosity: Annotated[
        Literal["low", "medium", "high"] | None, Hint('use "medium"', off=(None, "medium"))
    ] = None
    include_reasoning: bool | None = None
    separate_reasoning: Annotated[
        Literal[True] | None, Refused("start the server with --reasoning-parser none")
    ] = None
    stream_reasoning: Annotated[Literal[True] | None, Refused("use 'include_reasoning'")] = None

    audio: Annotated[None, Refused("remove it; only text is generated")] = None
    chat_template: Annotated[
        None, Refused("remove it; start the server with --chat-template to replace the model's own")
    ] = None
    documents: Annotated[NullOrEmpty, Refused("write them into a message")] = None
    echo: Annotated[Literal[False] | None, Refused("use /v1/completions")] = None
    function_call: Annotated[Literal["none"] | None, Refused("remove it; use 'tools'")] = None
    functions: Annotated[NullOrEmpty, Refused("remove it; use 'tools'")] = None
    mm_processor_kwargs: Annotated[NullOrEmpty, Refused("remove it; only text is read")] = None
    modalities: Annotated[
        Annotated[list[Literal["text"]], Field(fail_fast=True)] | None, Refused('use ["text"]')
    ] = None
    moderation: Annotated[None, Refused("remove it")] = None
    web_search_options: Annotated[None, Refused("remove it; nothing is searched")] = None

    @property
    def max_output_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise PydanticCustomError(
                "max_tokens", "'max_tokens' and 'max_completion_tokens' differ; send only the latter"
            )
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "'top_logprobs' needs \"logprobs\": true")
        if self.continue_final_message and self.add_generation_prompt:
            raise PydanticCustomError(
                "continue_final_message",
                "'continue_final_message' excludes a new generation prompt: "
                "send only one of 'add_generation_prompt' and 'continue_final_message'",
            )
        return self


def _as_prompts(value: Any) -> Any:
    """Turn a single prompt, a string or a list of token ids, into a list with this one prompt."""
    is_one = isinstance(value, str) or (
        isinstance(value, list) and not (value and isinstance(value[0], str | list))
    )
    return [value] if is_one else value


Prompts = Annotated[
    Annotated[list[str | TokenIds], Field(max_length=MAX_TOTAL_CHOICES, fail_fast=True)],
    BeforeValidator(
        _as_prompts,
        json_schema_input_type=str
        | TokenIds
        | Annotated[list[str | TokenIds], Field(max_length=MAX_TOTAL_CHOICES)],
    ),
]


class CompletionRequest(OpenAIRequestFields):
    """The body of POST /v1/completions. `max_tokens` defaults to 16; with `echo` it may be 0, which returns the prompt alone."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None

    suffix: Annotated[Literal[""] | None, Refused("remove it")] = None

    @property
    def max_output_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                "max_tokens", "'max_tokens' 0 needs \"echo\": true; otherwise the response would be empty"
            )
        if (choices := len(self.prompt) * (self.n or 1)) > MAX_TOTAL_CHOICES:
            raise PydanticCustomError(
                "n",
                f"'prompt' and 'n' together request {choices} choices; a request may have at most {MAX_TOTAL_CHOICES}",
            )
        return self


class SglangSamplingParams(CommonSamplingFields):
    """SGLang's `sampling_params` of POST /generate."""

    max_new_tokens: TokenLimit | None = None
    min_new_tokens: Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    sampling_seed: Annotated[int, Field(ge=SEED.low, le=SEED.high)] | None = None
    no_stop_trim: bool | None = None
    json_schema: JsonSchema | GrammarSource | None = None
    regex: GrammarSource | None = None
    ebnf: GrammarSource | None = None
    structural_tag: GrammarSource | StructuralTagFormat | None = None

    n: Annotated[Literal[1] | None, Refused("use 1; send one request for each answer")] = None
    stop_regex: Annotated[NullOrEmpty, Refused("use 'stop'")] = None
    custom_params: Annotated[NullOrEmpty, Refused("remove it")] = None

    def translate(self) -> dict[str, Any]:
        """Return the parameters that are set, under the names of ``GenerateBody``."""
        fields = {name: getattr(self, name) for name in self.model_fields_set - _SGLANG_REFUSED}
        tag = fields.pop("structural_tag", None)
        if tag is not None:
            fields["structured_outputs"] = StructuredOutputs.model_construct(
                {"structural_tag"}, structural_tag=tag
            )
        return {_SGLANG_NAMES.get(name, name): value for name, value in fields.items() if value is not None}


_SGLANG_REFUSED: Final = frozenset(
    name
    for name, field in SglangSamplingParams.model_fields.items()
    if support_of(field) is not Support.SERVED
)
"""Parameters that can only have the values that ask for nothing."""
_SGLANG_NAMES: Final = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    "json_schema": "guided_json",
}


class GenerateBody(SamplingFields, StructuredOutputFields):
    """The body of POST /generate, the native endpoint. The prompt is either `text` or `token_ids`.

    SGLang's spelling is understood as well: `input_ids`, `sampling_params`, `return_logprob`, `top_logprobs_num`, and
    `lora_path`, the name of an adapter.
    """

    model_config = ConfigDict(json_schema_extra=exactly_one("text", "token_ids", "input_ids"))

    text: str | None = None
    token_ids: TokenIds | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None

    input_ids: TokenIds | None = None
    sampling_params: SglangSamplingParams | None = None
    return_logprob: bool | None = None
    top_logprobs_num: NumLogprobs | None = None
    logprob_start_len: Annotated[Literal[-1] | None, Refused("use 'prompt_logprobs'")] = None
    return_text_in_logprobs: Annotated[Literal[False] | None, Refused("use /detokenize")] = None
    return_hidden_states: Annotated[Literal[False] | None, Refused("remove it")] = None
    model: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    lora_path: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    image_data: Annotated[None, Refused("remove it; only text is read")] = None
    rid: Annotated[RequestId | None, Hint("send the header X-Request-Id")] = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if [self.text, self.token_ids, self.input_ids].count(None) != 2:
            raise PydanticCustomError("input", "send either 'text' or 'token_ids'")
        if self.model is not None and self.lora_path not in (None, self.model):
            raise PydanticCustomError(
                "model", "'model' and 'lora_path' name different adapters; send one of them"
            )
        if self.top_logprobs_num and not self.return_logprob:
            raise PydanticCustomError("top_logprobs_num", "'top_logprobs_num' needs \"return_logprob\": true")
        return self

    def translate(self) -> dict[str, Any] | None:
        """Return the fields under the names of this endpoint alone, None if no other names are used."""
        if not self.model_fields_set & _SGLANG_FIELDS:
            return None
        fields = {name: getattr(self, name) for name in self.model_fields_set - _SGLANG_FIELDS}
        theirs: dict[str, Any] = {} if self.sampling_params is None else self.sampling_params.translate()
        if self.input_ids is not None:
            theirs["token_ids"] = self.input_ids
        if self.return_logprob:
            theirs["logprobs"] = self.top_logprobs_num or 0
        for name in theirs:
            if fields.get(name) is not None:
                raise InvalidRequest(
                    f"'{name}' is sent twice, once under SGLang's name; send it once", param=name
                )
        return fields | theirs


_SGLANG_FIELDS: Final = frozenset(
    ("input_ids", "sampling_params", "return_logprob", "top_logprobs_num", "logprob_start_len")
)
