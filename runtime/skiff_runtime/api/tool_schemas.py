"""The fields by which a chat request offers tools, and by which messages tell of calls."""

import json
from typing import Annotated, Any, Final, Literal

from pydantic import Field, JsonValue, model_validator
from pydantic_core import PydanticCustomError

from skiff_runtime.api.strict import Strict

MAX_TOOLS: Final = 128
MAX_CALLS: Final = 128
MAX_ARGUMENT_CHARACTERS: Final = 1 << 20

Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]


class Function(Strict):
    """A function that the model may call. ``parameters``: JSON schema of its arguments, without one: none."""

    name: Name
    description: Annotated[str, Field(max_length=1 << 16)] | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    """A tool."""

    type: Literal["function"]
    function: Function

    def offered(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return {
            "type": "function",
            "function": self.function.model_dump(exclude_none=True, exclude={"strict"}),
        }


class NamedFunction(Strict):
    """A function by its name."""

    name: Name


class NamedToolChoice(Strict):
    """The one function that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class AssistantFunctionCall(Strict):
    """What an earlier answer called. ``arguments``: JSON text of an object; "" means none."""

    name: Name
    arguments: Annotated[str, Field(max_length=MAX_ARGUMENT_CHARACTERS)]

    @model_validator(mode="after")
    def _an_object(self) -> "AssistantFunctionCall":
        self.parsed()
        return self

    def parsed(self) -> dict[str, Any]:
        """The arguments as an object."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise PydanticCustomError("arguments", "'arguments' must be the JSON text of an object")
        return value


class Call(Strict):
    """One call of an earlier answer."""

    id: CallId
    type: Literal["function"]
    function: AssistantFunctionCall

    def told(self) -> dict[str, Any]:
        """The call as chat templates take it."""
        function = {"name": self.function.name, "arguments": self.function.parsed()}
        return {"id": self.id, "type": "function", "function": function}


class ToolFields(Strict):
    """What a chat request says of tools."""

    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _consistent_tools(self) -> "ToolFields":
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise PydanticCustomError("tools", "two of the 'tools' have one name; give each its own")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise PydanticCustomError("tool_choice", "'tool_choice' needs 'tools' to choose from")
        if isinstance(self.tool_choice, NamedToolChoice) and self.tool_choice.function.name not in names:
            raise PydanticCustomError(
                "tool_choice", "'tool_choice' names a function that is none of the 'tools'"
            )
        return self
