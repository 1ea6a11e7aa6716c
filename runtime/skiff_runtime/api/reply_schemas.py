"""What replies look like, for the API's description alone: the replies themselves are written without any of this.

Clients must expect further fields, so none of these forbids them.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

FinishReason = Annotated[
    Literal["stop", "length", "tool_calls", "abort"],
    Field(description="'length' also for a request that its deadline ended"),
]


class ErrorDetail(BaseModel):
    """What went wrong, and what to change."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """Every error, in OpenAI's shape."""

    error: ErrorDetail


class PromptDetails(BaseModel):
    """Of the prompt's tokens, those that the prefix cache held."""

    cached_tokens: int


class UsageReply(BaseModel):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class TokenLogprob(BaseModel):
    """One token and its natural log-probability."""

    token: str
    logprob: float | None
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    """One token of the answer, and the likeliest ones at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Of every token of the answer."""

    content: list[ChatTokenLogprob] | None


class CalledFunction(BaseModel):
    """``arguments``: JSON, as text; in a stream the next piece of it, and the name comes with the first."""

    name: str | None = None
    arguments: str


class ToolCall(BaseModel):
    """One call of a function."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The answer. In a stream, what was added to it."""

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


class ChatReply(BaseModel):
    """A chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageReply


class ChatChunkChoice(BaseModel):
    """What was added to one answer."""

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
    usage: UsageReply | None = None


class CompletionLogprobsReply(BaseModel):
    """Columns, one entry for each token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One completion, or what was added to it."""

    index: int
    text: str
    logprobs: CompletionLogprobsReply | None
    finish_reason: FinishReason | None


class CompletionReply(BaseModel):
    """A completion, or one event of a streamed one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageReply | None = None


class GenerateReply(BaseModel):
    """The native endpoint's reply, or one event of a streamed one."""

    id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    usage: UsageReply | None = None


class TokenizeReply(BaseModel):
    """Token ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(BaseModel):
    """The text of token ids."""

    prompt: str


class AbortReply(BaseModel):
    """How many requests were ended."""

    aborted: int


class FlushReply(BaseModel):
    """Pages of the KV cache that were freed, and requests that still hold some."""

    pages: int
    running: int


class ModelCard(BaseModel):
    """The served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """All served models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class StatusReply(BaseModel):
    """Where the service stands."""

    status: Literal["starting", "ready", "draining", "failed"]


class StartReply(StatusReply):
    """How far the start is: each process's phase, its progress from 0 to 1, and its phases' seconds."""

    elapsed_seconds: float
    processes: dict[str, dict[str, Any]]


class HealthReply(BaseModel):
    """One token was generated in so many seconds."""

    status: Literal["ok"]
    seconds: float


class ServerInfo(BaseModel):
    """Version, model, configuration (secrets left out), capacity and start."""

    version: str
    status: str
    model: dict[str, Any]
    config: dict[str, Any]
    kv_tokens: int
    start_phase_seconds: dict[str, float]
