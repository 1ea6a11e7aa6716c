"""Output items of a Responses request, built delta by delta, and the events of a stream that describe them.

The same builder serves a response that is not streamed: its ``EventWriter`` then writes nothing, and the items at the
end are the same, however the text was cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from skiff_runtime.api.formats.response_items import (
    CUSTOM_TOOL_INPUT,
    Item,
    format_output_text,
    make_id,
)
from skiff_runtime.api.formats.response_tools import OfferedTool
from skiff_runtime.api.parsing.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallDelta
from skiff_runtime.api.schemas.json_object import parse_object
from skiff_runtime.sse import encode_json

COMPLETED: Final = "completed"
INCOMPLETE: Final = "incomplete"
IN_PROGRESS: Final = "in_progress"


class EventWriter:
    """Writes the events of one stream, numbered from 0; b"" for a response that is not streamed."""

    __slots__ = ("_is_streaming", "_next_number")

    def __init__(self, *, is_streaming: bool) -> None:
        self._is_streaming = is_streaming
        self._next_number = 0

    def write(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """Return an event with these fields."""
        if not self._is_streaming:
            return b""
        event = {"type": kind, "sequence_number": self._take_number(), **fields}
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_json(event))

    def write_response(self, kind: str, response: bytes) -> bytes:
        """Return an event with a response, which is JSON already."""
        if not self._is_streaming:
            return b""
        name = kind.encode()
        return b'event: %b\ndata: {"type":"%b","sequence_number":%d,"response":%b}\n\n' % (
            name,
            name,
            self._take_number(),
            response,
        )

    def make_template(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        """Return the constant part of events that differ in their number and ``delta``, for ``write_delta``."""
        head = encode_json({"type": kind, **fields}).removesuffix(b"}")
        return b'event: %b\ndata: %b,"sequence_number":' % (kind.encode(), head)

    def write_delta(self, template: bytes, delta: str) -> bytes:
        """Return an event with the next ``delta``. A token of plain text costs one call."""
        if not self._is_streaming:
            return b""
        number = self._next_number
        self._next_number = number + 1
        return b"".join((template, encode_json(number), b',"delta":', encode_json(delta), b"}\n\n"))

    def _take_number(self) -> int:
        number = self._next_number
        self._next_number = number + 1
        return number


class _OpenItem(Protocol):
    """The item that the deltas add to."""

    def open(self) -> bytes:
        """Return the events that begin the item."""
        ...

    def close(self, status: str) -> tuple[Item, bytes]:
        """Return the complete item, and the events that end it."""
        ...


class _TextItem(ABC):
    """Text in one part, of a message or of reasoning."""

    __slots__ = ("_events", "_place", "_template", "_texts", "index", "item_id")

    prefix: str
    delta_event: str
    done_event: str

    def __init__(self, events: EventWriter, index: int) -> None:
        self._events = events
        self._texts: list[str] = []
        self.index = index
        self.item_id = make_id(self.prefix)
        self._place = {"item_id": self.item_id, "output_index": index, "content_index": 0}
        self._template = events.make_template(self.delta_event, {**self._place, **self.delta_fields()})

    def delta_fields(self) -> Item:
        """Return the constant fields of an event with a delta."""
        return {}

    def done_fields(self) -> Item:
        """Return the fields of the event at the end of the text, beside the text."""
        return {}

    @abstractmethod
    def part(self, text: str) -> Item:
        """Return the content part."""

    @abstractmethod
    def item(self, content: list[Item], status: str) -> Item:
        """Return the item."""

    def open(self) -> bytes:
        item = self.item([], IN_PROGRESS)
        added = self._events.write("response.output_item.added", {"output_index": self.index, "item": item})
        part = {**self._place, "part": self.part("")}
        return added + self._events.write("response.content_part.added", part)

    def add(self, text: str) -> bytes:
        """Add text, and return its event."""
        self._texts.append(text)
        return self._events.write_delta(self._template, text)

    def close(self, status: str) -> tuple[Item, bytes]:
        events, text = self._events, "".join(self._texts)
        part = self.part(text)
        item = self.item([part], status)
        done = events.write(self.done_event, {**self._place, "text": text, **self.done_fields()})
        part_done = events.write("response.content_part.done", {**self._place, "part": part})
        item_done = events.write("response.output_item.done", {"output_index": self.index, "item": item})
        return item, done + part_done + item_done


class _ReasoningItem(_TextItem):
    """Reasoning, as it is: no summary of it is made."""

    __slots__ = ()

    prefix = "rs"
    delta_event = "response.reasoning_text.delta"
    done_event = "response.reasoning_text.done"

    def part(self, text: str) -> Item:
        return {"type": "reasoning_text", "text": text}

    def item(self, content: list[Item], status: str) -> Item:
        fields: Item = {"summary": [], "content": content, "encrypted_content": None}
        return {"id": self.item_id, "type": "reasoning", **fields, "status": status}


class _MessageItem(_TextItem):
    """A message with one part of text."""

    __slots__ = ("_logprobs",)

    prefix = "msg"
    delta_event = "response.output_text.delta"
    done_event = "response.output_text.done"

    def __init__(self, events: EventWriter, index: int) -> None:
        super().__init__(events, index)
        self._logprobs: list[Item] = []

    def delta_fields(self) -> Item:
        return {"logprobs": []}

    def done_fields(self) -> Item:
        return {"logprobs": self._logprobs}

    def part(self, text: str) -> Item:
        return format_output_text(text, self._logprobs)

    def item(self, content: list[Item], status: str) -> Item:
        return {
            "id": self.item_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def add_with_logprobs(self, text: str, logprobs: Sequence[Item]) -> bytes:
        """Add text and the log-probabilities of its tokens, and return their event."""
        self._texts.append(text)
        self._logprobs += logprobs
        return self._events.write(self.delta_event, {**self._place, "delta": text, "logprobs": logprobs})


class _CallItem:
    """A call of a function. The arguments of a custom tool's call are shown once they are complete, as its input."""

    __slots__ = ("_arguments", "_call", "_events", "_is_custom", "_place", "_template", "index", "number")

    def __init__(
        self, events: EventWriter, index: int, delta: ToolCallDelta, tool: OfferedTool | None
    ) -> None:
        self._events = events
        self._arguments: list[str] = []
        self._is_custom = tool is not None and tool.is_custom
        self.index = index
        self.number = delta.index
        kind, prefix = ("custom_tool_call", "ctc") if self._is_custom else ("function_call", "fc")
        name = delta.name if tool is None else tool.tool.name
        self._call: Item = {"id": make_id(prefix), "type": kind, "call_id": delta.id, "name": name}
        if tool is not None and tool.namespace is not None:
            self._call["namespace"] = tool.namespace
        self._place = {"item_id": self._call["id"], "output_index": index}
        self._template = events.make_template("response.function_call_arguments.delta", self._place)

    def open(self) -> bytes:
        item = self._item("", IN_PROGRESS)
        return self._events.write("response.output_item.added", {"output_index": self.index, "item": item})

    def add(self, arguments: str) -> bytes:
        """Add a part of the arguments, and return its event."""
        if not arguments:
            return b""
        self._arguments.append(arguments)
        return b"" if self._is_custom else self._events.write_delta(self._template, arguments)

    def close(self, status: str) -> tuple[Item, bytes]:
        arguments = "".join(self._arguments)
        value = parse_object(arguments)
        if value is not None:
            status = COMPLETED
        events = self._events
        if self._is_custom:
            text = value.get(CUSTOM_TOOL_INPUT) if value is not None else None
            text = text if isinstance(text, str) else arguments
            template = events.make_template("response.custom_tool_call_input.delta", self._place)
            done = events.write_delta(template, text)
            done += events.write("response.custom_tool_call_input.done", {**self._place, "input": text})
            item = self._item(text, status)
        else:
            done = events.write(
                "response.function_call_arguments.done",
                {**self._place, "name": self._call["name"], "arguments": arguments},
            )
            item = self._item(arguments, status)
        item_done = events.write("response.output_item.done", {"output_index": self.index, "item": item})
        return item, done + item_done

    def _item(self, text: str, status: str) -> Item:
        field = "input" if self._is_custom else "arguments"
        return {**self._call, field: text, "status": status}


class OutputBuilder:
    """Builds the output items of one response. ``items`` has those that are complete.

    ``reasoning_tokens``: tokens of the reasoning. A marker counts if its token arrived together with reasoning.
    """

    __slots__ = ("_events", "_logprobs", "_open", "_pending_tokens", "_tools", "items", "reasoning_tokens")

    def __init__(self, events: EventWriter, tools: Mapping[str, OfferedTool]) -> None:
        self._events = events
        self._tools = tools
        self._open: _OpenItem | None = None
        self._logprobs: list[Item] = []
        """Log-probabilities of tokens whose text is held back."""
        self._pending_tokens = 0
        """The number of those tokens."""
        self.items: list[Item] = []
        self.reasoning_tokens = 0

    def add_text(self, text: str) -> bytes:
        """Add plain text of a message, and return its events. The path of a token that needs no parsing."""
        item = self._open
        if type(item) is _MessageItem:
            return item.add(text)
        return self._add_delta(ContentDelta(text))

    def add(self, deltas: Sequence[Delta], *, tokens: int, logprobs: Sequence[Item]) -> bytes:
        """Add the deltas of one row, and return their events. ``tokens``: its number of tokens, 0 or 1."""
        self._pending_tokens += tokens
        self._logprobs += logprobs
        return b"".join([self._add_delta(delta) for delta in deltas])

    def finish(self, status: str) -> bytes:
        """End the last item, and return its events. A complete response has a message or a call."""
        events = b""
        if isinstance(self._open, _ReasoningItem):
            self.reasoning_tokens += self._pending_tokens
        elif isinstance(self._open, _MessageItem) and self._logprobs:
            events = self._open.add_with_logprobs("", self._logprobs)
        events += self._close(status)
        if status == COMPLETED and all(item["type"] == "reasoning" for item in self.items):
            events += self._open_item(_MessageItem(self._events, len(self.items))) + self._close(status)
        return events

    def _add_delta(self, delta: Delta) -> bytes:
        pending, self._pending_tokens = self._pending_tokens, 0
        logprobs, self._logprobs = self._logprobs, []
        match delta:
            case ContentDelta():
                opening = b""
                message = self._open
                if not isinstance(message, _MessageItem):
                    message = _MessageItem(self._events, self._next_index())
                    opening = self._open_item(message)
                if logprobs:
                    return opening + message.add_with_logprobs(delta.text, logprobs)
                return opening + message.add(delta.text)
            case ReasoningDelta():
                self.reasoning_tokens += pending
                opening = b""
                reasoning = self._open
                if not isinstance(reasoning, _ReasoningItem):
                    reasoning = _ReasoningItem(self._events, self._next_index())
                    opening = self._open_item(reasoning)
                return opening + reasoning.add(delta.text)
            case ToolCallDelta():
                opening = b""
                call = self._open
                if not isinstance(call, _CallItem) or call.number != delta.index:
                    tool = self._tools.get(delta.name or "")
                    call = _CallItem(self._events, self._next_index(), delta, tool)
                    opening = self._open_item(call)
                return opening + call.add(delta.arguments)

    def _next_index(self) -> int:
        return len(self.items) + (self._open is not None)

    def _open_item(self, item: _OpenItem) -> bytes:
        events = self._close(COMPLETED)
        self._open = item
        return events + item.open()

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        item, events = self._open.close(status)
        self.items.append(item)
        self._open = None
        return events
