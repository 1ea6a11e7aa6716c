"""The request bodies of the API, as pydantic models: what OpenAI knows, what Skiff adds, what is refused.

Every field that OpenAI's API knows is declared. One that is not served yet accepts only the value that means
"off"; anything else is refused by name with the advice in ``refusals.UNSERVED``. Unknown fields are refused too.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from skiff_runtime.api.format_schemas import StructuredOutputFields
from skiff_runtime.api.message_schemas import Empty, Message
from skiff_runtime.api.strict import Strict as Strict
from skiff_runtime.api.strict import exactly_one
from skiff_runtime.api.tool_schemas import ToolFields
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

MAX_MESSAGES: Final = 4096
MAX_TOTAL_CHOICES: Final = 1024
"""Prompts of one request, times the choices of each: so many are set up in a few milliseconds."""
MAX_PRIORITY: Final = 1000
MAX_SALT_CHARACTERS: Final = 256
MAX_CHAT_TEMPLATE_KWARGS: Final = 64
DEFAULT_COMPLETION_TOKENS: Final = 16


def _listed(kind: type) -> Callable[[Any], Any]:
    """Accept one ``kind`` where a list of them is meant."""

    def listed(value: Any) -> Any:
        return [value] if isinstance(value, kind) else value

    return listed


Count = Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS)]
Penalty = Annotated[float, Field(ge=PENALTY.low, le=PENALTY.high)]
Logprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_STRING_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class StreamOptions(Strict):
    """``include_usage``: a last event tells the token counts. ``continuous_usage_stats``: so does every other event."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] = False


class Sampling(Strict):
    """How tokens are chosen: OpenAI's fields, and the field's usual extensions (``top_k``, ``min_p`` and on)."""

    max_tokens: Count | None = None
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
            _listed(str),
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
        """How many tokens are asked for at most, None without a limit."""
        return self.max_tokens

    @model_validator(mode="after")
    def _least_below_limit(self) -> Self:
        least, limit = self.min_tokens or 0, self.max_output_tokens
        if limit is not None and least > limit:
            raise PydanticCustomError(
                "min_tokens", f"'min_tokens' is {least}, but no more than {limit} tokens are asked for"
            )
        return self


class OpenAIRequestFields(Sampling, StructuredOutputFields):
    """What both OpenAI endpoints share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    best_of: Literal[1] | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "'stream_options' needs \"stream\": true")
        return self


class ChatCompletionRequest(OpenAIRequestFields, ToolFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Logprobs | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], JsonValue], Field(max_length=MAX_CHAT_TEMPLATE_KWARGS)
        ]
        | None
    ) = None

    audio: None = None
    function_call: Literal["none"] | None = None
    functions: Empty = None
    metadata: Empty = None
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
    def _consistent(self) -> "ChatCompletionRequest":
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
                "an answer that continues the final message has no prompt of its own: "
                "send only one of 'add_generation_prompt' and 'continue_final_message'",
            )
        return self


def _as_prompts(value: Any) -> Any:
    """One prompt means a list of it."""
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
    """POST /v1/completions. ``max_tokens`` is 16 unless given, as OpenAI has it; 0 with ``echo``: the prompt alone."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: Logprobs | None = None

    suffix: Literal[""] | None = None

    @property
    def max_output_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError(
                "max_tokens", "'max_tokens' 0 needs \"echo\": true, else nothing is told"
            )
        if (answers := len(self.prompt) * (self.n or 1)) > MAX_TOTAL_CHOICES:
            raise PydanticCustomError(
                "n",
                f"'prompt' and 'n' together ask for {answers} answers; send at most {MAX_TOTAL_CHOICES} at a time",
            )
        return self


class GenerateBody(Sampling, StructuredOutputFields):
    """POST /generate, the native endpoint: ``text`` or ``token_ids`` in, text and token ids out."""

    model_config = ConfigDict(json_schema_extra=exactly_one("text", "token_ids"))

    text: str | None = None
    token_ids: TokenIds | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None

    @model_validator(mode="after")
    def _one_input(self) -> "GenerateBody":
        if (self.text is None) == (self.token_ids is None):
            raise PydanticCustomError("input", "send either 'text' or 'token_ids'")
        return self
