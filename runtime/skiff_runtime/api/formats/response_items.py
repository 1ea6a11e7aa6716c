"""Items of the Responses API: from the input of a request to items as they are stored, and from items to chat messages.

A conversation is a list of items; a chat template renders messages. Reasoning, a message and the calls that follow it are
three or more items and one message of the assistant.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from skiff_runtime.api.schemas.json_object import parse_object
from skiff_runtime.api.schemas.responses_request import (
    ContentPart,
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputItem,
    ItemReference,
    MessageItem,
    ReasoningItem,
    RefusalPart,
)

Item = dict[str, Any]
CUSTOM_TOOL_INPUT: Final = "input"
"""The only argument of the function as which the model sees a custom tool."""
NAMESPACE_SEPARATOR: Final = "__"


def make_id(prefix: str) -> str:
    """Return a new id."""
    return f"{prefix}_{secrets.token_hex(12)}"


def offered_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model sees a tool."""
    return name if namespace is None else namespace + NAMESPACE_SEPARATOR + name


def normalize_input(
    items: Sequence[InputItem], load_items: Callable[[Sequence[str]], Mapping[str, Item]]
) -> list[Item]:
    """Return input items as they are stored: with an id and a status, and references replaced by their items.

    ``load_items`` returns the stored items by id, and raises ``RequestError`` for an unknown or repeated one.
    """
    ids = [item.id for item in items if isinstance(item, ItemReference)]
    stored = load_items(ids) if ids else {}
    return [stored[item.id] if isinstance(item, ItemReference) else _normalize(item) for item in items]


def _normalize(item: InputItem) -> Item:
    match item:
        case MessageItem():
            is_answer = item.role == "assistant"
            content = [_format_part(part, is_answer=is_answer) for part in item.content]
            fields: Item = {"role": item.role, "content": content}
            return {"type": "message", "id": item.id or make_id("msg"), **fields, "status": "completed"}
        case FunctionCallItem():
            fields = {"call_id": item.call_id, "name": item.name, "arguments": item.arguments}
            return _normalize_call(item, "fc", fields)
        case CustomToolCallItem():
            fields = {"call_id": item.call_id, "name": item.name, "input": item.input}
            return _normalize_call(item, "ctc", fields)
        case FunctionCallOutputItem() | CustomToolCallOutputItem():
            prefix = "fco" if isinstance(item, FunctionCallOutputItem) else "ctco"
            output = "".join(_part_text(part) for part in item.output)
            fields = {"call_id": item.call_id, "output": output, "status": "completed"}
            return {"type": item.type, "id": item.id or make_id(prefix), **fields}
        case ReasoningItem():
            summary = [{"type": "summary_text", "text": part.text} for part in item.summary or ()]
            texts = [{"type": "reasoning_text", "text": part.text} for part in item.content or ()]
            return {
                "type": "reasoning",
                "id": item.id or make_id("rs"),
                "summary": summary,
                "content": texts,
                "status": "completed",
            }
        case _:
            raise AssertionError(item)


def _normalize_call(item: FunctionCallItem | CustomToolCallItem, prefix: str, fields: Item) -> Item:
    if item.namespace is not None:
        fields["namespace"] = item.namespace
    return {"type": item.type, "id": item.id or make_id(prefix), **fields, "status": "completed"}


def _part_text(part: ContentPart) -> str:
    return part.refusal if isinstance(part, RefusalPart) else part.text


def _format_part(part: ContentPart, *, is_answer: bool) -> Item:
    if isinstance(part, RefusalPart):
        return {"type": "refusal", "refusal": part.refusal}
    if is_answer:
        return format_output_text(part.text)
    return {"type": "input_text", "text": part.text}


def format_output_text(text: str, logprobs: Sequence[Any] = ()) -> Item:
    """Return a text part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def without_logprobs(item: Item) -> Item:
    """Return an item of the output without log-probabilities, which are no part of a conversation."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def build_messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the chat messages of a conversation.

    ``instructions`` and the system messages at its beginning become one message, because many templates know one only.
    """
    builder = _MessageBuilder()
    if instructions:
        builder.add_message("system", instructions)
    for item in items:
        builder.add(item)
    return builder.finish()


class _MessageBuilder:
    """Collects messages. ``_turn`` is the assistant's message that the next item may belong to."""

    def __init__(self) -> None:
        self._leading: list[str] = []
        """Texts of the system before the first message of another role. Joined once, so that the time is linear."""
        self._messages: list[dict[str, Any]] = []
        self._turn: dict[str, Any] | None = None

    def add(self, item: Item) -> None:
        """Add an item in its stored form."""
        match item["type"]:
            case "message":
                text = "".join(part.get("text") or part.get("refusal") or "" for part in item["content"])
                self.add_message(item["role"], text)
            case "reasoning":
                self._add_reasoning(item)
            case "function_call":
                self._add_call(item, _parse_arguments(item["arguments"]))
            case "custom_tool_call":
                self._add_call(item, {CUSTOM_TOOL_INPUT: item["input"]})
            case "function_call_output" | "custom_tool_call_output":
                self._turn = None
                self._messages.append(
                    {"role": "tool", "content": item["output"], "tool_call_id": item["call_id"]}
                )

    def add_message(self, role: str, text: str) -> None:
        """Add a message's text."""
        if role == "assistant":
            turn = self._turn
            if turn is None or turn["content"] or "tool_calls" in turn:
                turn = self._begin_turn()
            turn["content"] = text
            return
        self._turn = None
        role = "system" if role == "developer" else role
        if role == "system" and not self._messages:
            self._leading.append(text)
        else:
            self._messages.append({"role": role, "content": text})

    def finish(self) -> list[dict[str, Any]]:
        """Return the messages."""
        if not self._leading:
            return self._messages
        return [{"role": "system", "content": "\n\n".join(self._leading)}, *self._messages]

    def _begin_turn(self) -> dict[str, Any]:
        self._turn = {"role": "assistant", "content": ""}
        self._messages.append(self._turn)
        return self._turn

    def _add_reasoning(self, item: Item) -> None:
        text = "".join(part["text"] for part in item.get("content") or item["summary"])
        if text:
            turn = self._turn
            if turn is None or turn["content"] or "tool_calls" in turn or "reasoning_content" in turn:
                turn = self._begin_turn()
            turn["reasoning_content"] = text

    def _add_call(self, item: Item, arguments: dict[str, Any]) -> None:
        turn = self._turn or self._begin_turn()
        name = offered_name(item["name"], item.get("namespace"))
        call = {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        turn.setdefault("tool_calls", []).append(call)


def _parse_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of an earlier call as templates expect them.

    The text of a call that was cut short is no JSON object; the model sees it as one argument.
    """
    value = parse_object(text or "{}")
    return {"arguments": text} if value is None else value
