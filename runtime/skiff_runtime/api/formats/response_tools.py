"""Tools of a Responses request: the functions that the model sees, and the calls that the client gets for them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from skiff_runtime.api.formats.response_items import CUSTOM_TOOL_INPUT, offered_name
from skiff_runtime.api.schemas.request_bodies import (
    MAX_TOOLS,
    FunctionDefinition,
    FunctionTool,
    NamedFunction,
    NamedToolChoice,
    ToolFields,
)
from skiff_runtime.api.schemas.responses_request import (
    AllowedTools,
    CustomTool,
    NamedTool,
    NamespaceTool,
    ResponsesFunctionTool,
    ResponsesRequest,
    WebSearchTool,
)
from skiff_runtime.errors import InvalidRequest

_CUSTOM_PARAMETERS: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {CUSTOM_TOOL_INPUT: {"type": "string"}},
    "required": [CUSTOM_TOOL_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class OfferedTool:
    """A tool that the model may call, and its ``namespace``, if it has one."""

    tool: ResponsesFunctionTool | CustomTool
    namespace: str | None = None

    @property
    def is_custom(self) -> bool:
        """Return whether calls of the tool have any text as input."""
        return isinstance(self.tool, CustomTool)

    @property
    def offered_name(self) -> str:
        """The name by which the model sees the tool."""
        return offered_name(self.tool.name, self.namespace)

    def to_function(self) -> FunctionTool:
        """Return the tool as the chat endpoint knows it.

        Not validated again: a name with its namespace may be longer than a name.
        """
        tool = self.tool
        function = FunctionDefinition.model_construct(
            name=self.offered_name,
            description=tool.description,
            parameters=_CUSTOM_PARAMETERS if isinstance(tool, CustomTool) else tool.parameters,
            strict=None if isinstance(tool, CustomTool) else tool.strict,
        )
        return FunctionTool.model_construct(type="function", function=function)


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools that one request offers to the model. ``by_name``: by the names that the model sees.

    ``fields`` has them and the choice as fields of the chat endpoint, ``echoed`` as the response shows them.
    """

    by_name: dict[str, OfferedTool]
    fields: ToolFields
    echoed: list[dict[str, Any]]

    @classmethod
    def from_body(cls, body: ResponsesRequest) -> Self:
        """Return the tools of a request. Raises ``InvalidRequest`` for tools that contradict each other."""
        tools = _by_name(list(_flatten(body)))
        choice = body.tool_choice
        mode: Any = choice
        if isinstance(choice, AllowedTools):
            names = [_resolve(each.name, each.namespace, tools) for each in choice.tools if each.name]
            tools = {name: tool for name, tool in tools.items() if name in names}
            mode = choice.mode
        elif isinstance(choice, NamedTool):
            name = _resolve(choice.name, choice.namespace, tools)
            mode = NamedToolChoice.model_construct(
                type="function", function=NamedFunction.model_construct(name=name)
            )
        if mode == "required" and not tools:
            raise InvalidRequest("'tool_choice' needs 'tools' to choose from", param="tool_choice")
        fields = ToolFields.model_construct(
            tools=[tool.to_function() for tool in tools.values()] or None,
            tool_choice=mode,
            parallel_tool_calls=body.parallel_tool_calls,
        )
        return cls(tools, fields, [_echo(tool) for tool in body.tools or () if not _is_hosted(tool)])


def _is_hosted(tool: Any) -> bool:
    return isinstance(tool, WebSearchTool)


def _echo(tool: Any) -> dict[str, Any]:
    fields: dict[str, Any] = tool.model_dump(by_alias=True, exclude_none=True)
    if isinstance(tool, ResponsesFunctionTool):
        return {"parameters": None, "strict": None, **fields}
    return {"description": "", **fields} if isinstance(tool, NamespaceTool) else fields


def _flatten(body: ResponsesRequest) -> Iterator[OfferedTool]:
    for tool in body.tools or ():
        if isinstance(tool, NamespaceTool):
            yield from (OfferedTool(each, tool.name) for each in tool.tools)
        elif not isinstance(tool, WebSearchTool):
            yield OfferedTool(tool)


def _by_name(tools: Sequence[OfferedTool]) -> dict[str, OfferedTool]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(
            f"the 'tools' and their namespaces contain {len(tools)} tools; send at most {MAX_TOOLS}",
            param="tools",
        )
    by_name = {tool.offered_name: tool for tool in tools}
    if len(by_name) < len(tools):
        raise InvalidRequest("two of the 'tools' have the same name; names must be unique", param="tools")
    return by_name


def _resolve(name: str, namespace: str | None, tools: dict[str, OfferedTool]) -> str:
    """Return the name by which the model sees the tool that 'tool_choice' names."""
    offered = offered_name(name, namespace)
    if offered not in tools:
        raise InvalidRequest(
            f"'tool_choice' names {offered[:200]!r}, which is not among the 'tools'", param="tool_choice"
        )
    return offered
