"""Response bodies of the generation endpoints as pydantic models, for the OpenAPI document.

Responses are written without these models, by the formatters in ``formats``. Clients must expect further fields, so no
model forbids them. The docstrings of these classes are descriptions in the OpenAPI document.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

FinishReason = Annotated[
    Literal["stop", "length", "tool_calls", "abort"],
    Field(description='"length" also when the request reached its deadline.'),
]


class PromptTokensDetails(BaseModel):
    """Prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class UsageInfo(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(BaseModel):
    """A token and its natural log-probability."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    """An output token, and the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """The log-probabilities of the output tokens."""

    content: list[ChatTokenLogprob] | None


class ToolCallFunction(BaseModel):
    """The called function. `arguments` is JSON as text; in a stream, the next part of it. Only the first part has a name."""

    name: str | None = None
    arguments: str


class ToolCall(BaseModel):
    """A call of a function."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: ToolCallFunction


class AssistantMessage(BaseModel):
    """The generated message; in a stream, the next part of it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """A choice of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class PromptLogprob(BaseModel):
    """A token at a position of the prompt; `rank` is 1 for the most likely one."""

    logprob: float | None
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each token of the prompt, log-probabilities by token ID; null for the first token."""


class ChatCompletionResponse(BaseModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: PromptLogprobs | None = None


class ChatChunkChoice(BaseModel):
    """The next part of one choice."""

    index: int
    delta: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(BaseModel):
    """An event of a streamed chat completion. The last event is `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None


class CompletionLogprobsColumns(BaseModel):
    """Lists with one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """A choice of a completion; in a stream, the next part of it."""

    index: int
    text: str
    logprobs: CompletionLogprobsColumns | None
    finish_reason: FinishReason | None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(BaseModel):
    """A completion, or an event of a streamed completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None


class GenerateLogprob(BaseModel):
    """One token with the log-probability that it had, and the likeliest tokens at its place as pairs of the same two."""

    token_id: int
    logprob: float | None
    top: list[tuple[int, float | None]]


class GenerateResponse(BaseModel):
    """The response of the native endpoint, or an event of a streamed response."""

    id: str
    text: str
    token_ids: list[int]
    logprobs: list[GenerateLogprob] | None = None
    prompt_logprobs: list[GenerateLogprob] | None = None
    finish_reason: FinishReason | None = None
    usage: UsageInfo | None = None
