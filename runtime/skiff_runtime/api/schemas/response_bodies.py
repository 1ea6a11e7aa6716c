"""Replies of the generation endpoints as pydantic models, for the OpenAPI document.

The replies themselves are written without these models (``chunks``, ``chat_format``, ``completion_format``). Clients must
expect further fields, so no model forbids them.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, Field

FinishReason = Annotated[
    Literal["stop", "length", "tool_calls", "abort"],
    Field(description="'length' also for a request that its deadline ended"),
]


class PromptTokensDetails(BaseModel):
    """Tokens of the prompt that the prefix cache held."""

    cached_tokens: int


class UsageInfo(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(BaseModel):
    """One token and its natural log-probability."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    """One token of the answer, and the likeliest ones at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of every token of the answer."""

    content: list[ChatTokenLogprob] | None


class ToolCallFunction(BaseModel):
    """``arguments``: JSON, as text; in a stream the next piece of it, and the name comes with the first."""

    name: str | None = None
    arguments: str


class ToolCall(BaseModel):
    """One call of a function."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: ToolCallFunction


class AssistantMessage(BaseModel):
    """The answer; in a stream, the addition to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletionResponse(BaseModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo


class ChatChunkChoice(BaseModel):
    """The text that was added to one answer."""

    index: int
    delta: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatChunk(BaseModel):
    """One event of a streamed chat completion; the last event is ``[DONE]``."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | None = None


class CompletionLogprobsColumns(BaseModel):
    """Columns, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One completion, or the addition to it."""

    index: int
    text: str
    logprobs: CompletionLogprobsColumns | None
    finish_reason: FinishReason | None


class CompletionResponse(BaseModel):
    """A completion, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo | None = None


class GenerateResponse(BaseModel):
    """The native endpoint's reply, or one event of a streamed one."""

    id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    usage: UsageInfo | None = None
