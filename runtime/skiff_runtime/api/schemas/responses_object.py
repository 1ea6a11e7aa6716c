"""Response bodies and events of the Responses API as pydantic models, for the OpenAPI document.

Responses are written without these models, by the formatters in ``formats``. Clients must expect further fields, so no
model forbids them. The docstrings of these classes are descriptions in the OpenAPI document.
"""

from typing import Any, Literal

from pydantic import BaseModel, Field


class ResponseItem(BaseModel):
    """An item of the input or output: a message, reasoning, a call, or the result of a call."""

    type: Literal[
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
    ]
    id: str
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    role: str | None = None
    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | None = None


class InputTokensDetails(BaseModel):
    """Input tokens that were found in the prefix cache."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(BaseModel):
    """Output tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseErrorDetail(BaseModel):
    """The error of a response that failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(BaseModel):
    """The reason for which a response is incomplete; null for one that was aborted."""

    reason: Literal["max_output_tokens"] | None


class ResponseObject(BaseModel):
    """A response, with the parameters of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseErrorDetail | None
    incomplete_details: IncompleteDetails | None
    model: str
    instructions: str | None
    output: list[ResponseItem]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    max_output_tokens: int | None
    previous_response_id: str | None
    store: bool
    metadata: dict[str, str]
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class ResponseStreamEvent(BaseModel):
    """An event of a streamed response. The last one is `response.completed`, `response.incomplete` or `response.failed`."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.output_item.done",
        "response.content_part.added",
        "response.content_part.done",
        "response.output_text.delta",
        "response.output_text.done",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseObject | None = None
    output_index: int | None = None
    content_index: int | None = None
    item_id: str | None = None
    item: ResponseItem | None = None
    part: dict[str, Any] | None = None
    delta: str | None = None
    text: str | None = None
    arguments: str | None = None
    input: str | None = None
    name: str | None = None
    logprobs: list[dict[str, Any]] | None = None


class ItemList(BaseModel):
    """A page of the items of a response's input."""

    object: Literal["list"]
    data: list[ResponseItem]
    first_id: str = Field(description="Empty if the page is.")
    last_id: str
    has_more: bool


class DeletedResponse(BaseModel):
    """A response that was deleted."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]
