"""The messages of a chat request."""

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from skiff_runtime.api.strict import Strict
from skiff_runtime.api.tool_schemas import MAX_CALLS, Call, CallId

MAX_PARTS: Final = 1024

Empty = Annotated[list[Any], Field(max_length=0)] | Annotated[dict[str, Any], Field(max_length=0)] | None


class TextPart(Strict):
    """One piece of a message's content."""

    type: Literal["text"]
    text: str


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(Strict):
    """One turn. ``content`` is a string or a list of text parts; null fields of an earlier answer are welcome.

    An assistant's turn that calls tools needs no content; a tool's turn names the call that it answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS, fail_fast=True)] | None,
        BeforeValidator(
            _as_parts,
            json_schema_input_type=str
            | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)]
            | None,
        ),
    ] = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Call], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: CallId | None = None

    name: None = None
    refusal: None = None
    annotations: Empty = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _consistent(self) -> "Message":
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
                raise PydanticCustomError("role", f"'{field}' belongs to messages of the role \"{role}\"")
        if self.role == "tool" and not self.tool_call_id:
            raise PydanticCustomError("tool_call_id", "a message of the role \"tool\" needs 'tool_call_id'")
        return self

    def told(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        content = "".join(part.text for part in self.content or ())
        told: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": content,
        }
        if self.tool_calls:
            told["tool_calls"] = [call.told() for call in self.tool_calls]
        if self.reasoning_content:
            told["reasoning_content"] = self.reasoning_content
        if self.tool_call_id:
            told["tool_call_id"] = self.tool_call_id
        return told
