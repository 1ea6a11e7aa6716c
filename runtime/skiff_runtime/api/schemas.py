"""The request bodies of the API, as pydantic models: what OpenAI knows, what Skiff adds, what is refused.

Every field that OpenAI's API knows is declared. One that is not served yet accepts only the value that means
"off"; anything else is refused by name with the advice in ``UNSERVED``. Unknown fields are refused too.
"""

from collections.abc import Callable
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_MESSAGES: Final = 4096
MAX_PARTS: Final = 1024
MAX_STOPS: Final = 16
MAX_STOP_CHARACTERS: Final = 256
MAX_STOP_TOKENS: Final = 64
MAX_OUTPUT_TOKENS: Final = (1 << 31) - 1
DEFAULT_COMPLETION_TOKENS: Final = 16

UNSERVED: Final[dict[str, str]] = {
    "audio": "remove it; only text is generated",
    "best_of": "use 1; send several requests and choose among the answers",
    "echo": "use false; the prompt is known to the sender",
    "frequency_penalty": "use 0",
    "function_call": "remove it; tool calls are not supported",
    "functions": "remove it; tool calls are not supported",
    "logit_bias": "remove it",
    "logprobs": "remove it",
    "metadata": "remove it; nothing is stored",
    "modalities": 'use ["text"]',
    "moderation": "remove it",
    "n": "use 1; send one request for each answer",
    "name": "remove it from the message; write the name into its content",
    "parallel_tool_calls": "remove it; tool calls are not supported",
    "prediction": "remove it",
    "presence_penalty": "use 0",
    "prompt_cache_key": "remove it; prefixes are found without it",
    "prompt_cache_options": "remove it; prefixes are found without it",
    "prompt_cache_retention": "remove it; prefixes are kept while there is room",
    "reasoning_effort": "remove it",
    "response_format": 'use {"type": "text"}; ask for the format in the prompt',
    "safety_identifier": "remove it; use 'user'",
    "service_tier": 'use "auto"',
    "store": "use false; nothing is stored",
    "suffix": "remove it",
    "tool_calls": "remove it; tool calls are not supported",
    "tool_choice": 'use "none"; tool calls are not supported',
    "tools": "remove it; tool calls are not supported",
    "top_logprobs": "remove it",
    "verbosity": 'use "medium"',
    "web_search_options": "remove it; nothing is searched",
}
"""Fields that are not served yet -> what to do instead."""

WANTED: Final[dict[str, str]] = {
    "content": "must be a string or a list of text parts",
    "prompt": "must be a string or a list of token ids",
    "stop": f"must be a string or a list of at most {MAX_STOPS} strings",
}
"""Fields that take several types -> what they take."""


class Strict(BaseModel):
    """No coercion, no unknown field, no NaN."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


def _listed(kind: type) -> Callable[[Any], Any]:
    """Accept one ``kind`` where a list of them is meant."""

    def listed(value: Any) -> Any:
        return [value] if isinstance(value, kind) else value

    return listed


Empty = Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)] | None
Zero = Annotated[float, Field(ge=0, le=0)] | None
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]


class StreamOptions(Strict):
    """``include_usage``: a last event tells the token counts."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Sampling(Strict):
    """How tokens are chosen: OpenAI's fields, and the field's usual extensions (``top_k``, ``min_p`` and on)."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Annotated[
        Annotated[list[StopString], Field(max_length=MAX_STOPS, fail_fast=True)] | None,
        BeforeValidator(_listed(str)),
    ] = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None


class OpenAIRequest(Sampling):
    """What both OpenAI endpoints share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None

    n: Literal[1] | None = None
    frequency_penalty: Zero = None
    presence_penalty: Zero = None
    logit_bias: Empty = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "OpenAIRequest":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "'stream_options' needs \"stream\": true")
        return self


class TextPart(Strict):
    """One piece of a message's content."""

    type: Literal["text"]
    text: str


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(Strict):
    """One turn. ``content`` is a string or a list of text parts; null fields of an earlier answer are welcome."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)],
        BeforeValidator(_as_parts),
    ]

    name: None = None
    refusal: None = None
    annotations: Empty = None
    audio: None = None
    function_call: None = None
    tool_calls: Empty = None


class ChatRequest(OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_OUTPUT_TOKENS)] | None = None

    audio: None = None
    function_call: Literal["none"] | None = None
    functions: Empty = None
    logprobs: Literal[False] | None = None
    metadata: Empty = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    moderation: None = None
    parallel_tool_calls: Literal[True] | None = None
    prediction: None = None
    prompt_cache_key: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    response_format: "TextFormat | None" = None
    safety_identifier: None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None
    tool_choice: Literal["none"] | None = None
    tools: Empty = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None
    verbosity: Literal["medium"] | None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatRequest":
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise PydanticCustomError(
                "max_tokens", "'max_tokens' and 'max_completion_tokens' differ; send only the latter"
            )
        return self


class TextFormat(Strict):
    """The only response format there is yet."""

    type: Literal["text"]


def _one_prompt(value: Any) -> Any:
    """A list that holds one prompt means that prompt."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise PydanticCustomError(
                "several_prompts",
                "several prompts in one request are not supported yet; send one request for each",
            )
        return value[0]
    return value


Prompt = Annotated[str | TokenIds, BeforeValidator(_one_prompt)]


class CompletionRequest(OpenAIRequest):
    """POST /v1/completions. ``max_tokens`` is 16 unless given, as OpenAI has it."""

    prompt: Prompt

    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None
    suffix: Literal[""] | None = None


class GenerateBody(Sampling):
    """POST /generate, the native endpoint: ``text`` or ``token_ids`` in, text and token ids out."""

    text: str | None = None
    token_ids: TokenIds | None = None
    skip_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_input(self) -> "GenerateBody":
        if (self.text is None) == (self.token_ids is None):
            raise PydanticCustomError("input", "send either 'text' or 'token_ids'")
        return self
