"""Response bodies of Anthropic's Messages API as pydantic models, for the OpenAPI document.

Responses are written without these models, by ``formats/messages.py``. The docstrings of these classes are descriptions in
the OpenAPI document.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

StopReason = Annotated[
    Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"],
    Field(description='"max_tokens" also when the request reached its deadline or was aborted.'),
]


class MessageUsage(BaseModel):
    """Token counts. Tokens that were read from the prefix cache are no part of `input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageBlock(BaseModel):
    """A block of a message: text, thinking with its signature, or a tool call with its input."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageResponse(BaseModel):
    """A message."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEventDelta(BaseModel):
    """An increment of a block, or the reason for the end of the message."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"] | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None


class MessageStreamEvent(BaseModel):
    """An event of a streamed message, whose name is its type. `message_stop` is the last one."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: MessageResponse | None = None
    index: int | None = None
    content_block: MessageBlock | None = None
    delta: MessageEventDelta | None = None
    usage: MessageUsage | None = None


class TokenCountResponse(BaseModel):
    """The number of tokens of a request's prompt, whether or not they are in the prefix cache."""

    input_tokens: int


class AnthropicErrorDetail(BaseModel):
    """The error, and what to change. `details` tells clients that ask for a stored thread to go on without one."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicErrorResponse(BaseModel):
    """Any error, in Anthropic's shape. `request_id` is that of the header."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str
