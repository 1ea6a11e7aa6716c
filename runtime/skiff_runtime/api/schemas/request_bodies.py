"""Request bodies of the API as pydantic models.

Every field of OpenAI's API is declared here. A field that is not supported accepts only the value that means "off"; any
other value is rejected by name, with the advice in ``validation.UNSUPPORTED_FIELDS``. Unknown fields are rejected too, so
that no parameter is ignored silently.

The docstrings of these classes are descriptions in the OpenAPI document.
"""

import json
from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from skiff_runtime.config.limits import (
    LOGIT_BIAS,
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


class StrictModel(BaseModel):
    """Base of every request body: no type coercion, no unknown field, no NaN or infinity."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


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


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputFields(StrictModel):
    """Constraints on the output, of which a request may use one. The `guided_` fields have vLLM's names."""

    response_format: ResponseFormat | None = None
    guided_json: JsonSchema | GrammarSource | None = None
    guided_regex: GrammarSource | None = None
    guided_choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=4096)]],
            Field(min_length=1, max_length=MAX_GUIDED_CHOICES, fail_fast=True),
        ]
        | None
    ) = None
    guided_grammar: GrammarSource | None = None

    def constraints(self) -> dict[str, Any]:
        """Return the fields that constrain the output, by name."""
        fields = {name: getattr(self, name) for name in StructuredOutputFields.model_fields}
        return {
            name: value
            for name, value in fields.items()
            if not (value is None or isinstance(value, TextFormat))
        }


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


class AssistantFunctionCall(StrictModel):
    """The function that an earlier message called. `arguments` is a JSON object as text; "" means no arguments."""

    name: FunctionName
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENT_CHARACTERS)]

    @model_validator(mode="after")
    def _check_arguments(self) -> Self:
        self.parse_arguments()
        return self

    def parse_arguments(self) -> dict[str, Any]:
        """Return the arguments as an object."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise PydanticCustomError("arguments", "'arguments' must be a JSON object written as text")
        return value


class AssistantToolCall(StrictModel):
    """A tool call in an earlier message."""

    id: ToolCallId
    type: Literal["function"]
    function: AssistantFunctionCall

    def to_template(self) -> dict[str, Any]:
        """Return the call as chat templates expect it."""
        function = {"name": self.function.name, "arguments": self.function.parse_arguments()}
        return {"id": self.id, "type": "function", "function": function}


class ToolFields(StrictModel):
    """The tools that the model may call, and whether it must call one."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "two of the 'tools' have the same name; names must be unique")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise PydanticCustomError("tool_choice", "'tool_choice' needs 'tools' to choose from")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
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


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class ChatMessage(StrictModel):
    """A message of the conversation. `content` is a string or a list of text parts.

    An assistant's message with tool calls needs no content; a tool's message names the call that it answers. The fields
    of an earlier response that are null or empty are accepted, so that the response can be sent back as it came.
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
    tool_calls: (
        Annotated[list[AssistantToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)] | None
    ) = None
    tool_call_id: ToolCallId | None = None

    name: None = None
    refusal: None = None
    annotations: NullOrEmpty = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError(
                "content", "a message needs 'content', a string or a list of text parts"
            )
        for field, role in (
            ("tool_calls", "assistant"),
            ("reasoning_content", "assistant"),
            ("tool_call_id", "tool"),
        ):
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
            "content": "".join(part.text for part in self.content or ()),
        }
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_call_id:
            message["tool_call_id"] = self.tool_call_id
        return message


# Sampling

TokenLimit = Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS)]
Penalty = Annotated[float, Field(ge=PENALTY.low, le=PENALTY.high)]
NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class SamplingFields(StrictModel):
    """Sampling parameters: OpenAI's, and the extensions that vLLM and SGLang share (`top_k`, `min_p` and others)."""

    max_tokens: TokenLimit | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=TEMPERATURE.low, le=TEMPERATURE.high)] | None = None
    top_p: Annotated[float, Field(gt=TOP_P.low, le=TOP_P.high)] | None = None
    top_k: Annotated[int, Field(ge=TOP_K.low, le=TOP_K.high)] | None = None
    min_p: Annotated[float, Field(ge=MIN_P.low, le=MIN_P.high)] | None = None
    seed: Annotated[int, Field(ge=SEED.low, le=SEED.high)] | None = None
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
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    stream: bool | None = None

    @property
    def max_output_tokens(self) -> int | None:
        """The largest number of output tokens, or None without a limit."""
        return self.max_tokens

    @model_validator(mode="after")
    def _check_min_tokens(self) -> Self:
        least, limit = self.min_tokens or 0, self.max_output_tokens
        if limit is not None and least > limit:
            raise PydanticCustomError(
                "min_tokens", f"'min_tokens' is {least}, but the output is limited to {limit} tokens"
            )
        return self


class StreamOptions(StrictModel):
    """`include_usage` adds a last event with the token counts; `continuous_usage_stats` adds them to every event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] = False


# The three generation endpoints


class OpenAIRequestFields(SamplingFields, StructuredOutputFields):
    """The fields that both OpenAI endpoints share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Literal[1] | None = None
    prompt_logprobs: NumLogprobs | None = None

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
    chat_template_kwargs: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], JsonValue], Field(max_length=MAX_CHAT_TEMPLATE_KWARGS)
        ]
        | None
    ) = None

    # Unsupported: each accepts only the values that mean "off".
    audio: None = None
    function_call: Literal["none"] | None = None
    functions: NullOrEmpty = None
    metadata: NullOrEmpty = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    moderation: None = None
    prediction: None = None
    prompt_cache_key: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    safety_identifier: None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None

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

    suffix: Literal[""] | None = None

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


class GenerateBody(SamplingFields, StructuredOutputFields):
    """The body of POST /generate, the native endpoint. The prompt is either `text` or `token_ids`."""

    model_config = ConfigDict(json_schema_extra=exactly_one("text", "token_ids"))

    text: str | None = None
    token_ids: TokenIds | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.text is None) == (self.token_ids is None):
            raise PydanticCustomError("input", "send either 'text' or 'token_ids'")
        return self
