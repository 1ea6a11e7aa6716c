"""Responses and events of the Responses API, checked against OpenAI's own types in strict mode."""

import json
from typing import Any, Final

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

_EVENT: Final[TypeAdapter[Any]] = TypeAdapter(ResponseStreamEvent)
ENDS: Final = {"response.completed", "response.incomplete", "response.failed"}


def check_response(body: bytes | str | dict[str, Any]) -> dict[str, Any]:
    """Return a response, which must be valid by OpenAI's type."""
    response: dict[str, Any] = body if isinstance(body, dict) else json.loads(body)
    parsed = Response.model_validate(response, strict=True)
    for item, given in zip(parsed.output, response["output"], strict=True):
        assert item.type == given["type"]
    return response


def check_stream(data: bytes | str) -> list[dict[str, Any]]:
    """Return the events of a complete stream, which must be valid, in order, and complete.

    Items and parts begin and end once, deltas add up to the text at the end, and the last event has all items.
    """
    text = data.decode() if isinstance(data, bytes) else data
    *blocks, rest = text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        name, payload = block.split("\n")
        event = json.loads(payload.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        parsed = _EVENT.validate_python(event, strict=True)
        assert parsed.type == event["type"]
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] for event in events if event["type"] in ENDS] == [events[-1]["type"]]
    check_response(events[0]["response"])
    last = check_response(events[-1]["response"])
    assert last["id"] == events[0]["response"]["id"]
    assert collect_items(events) == last["output"]
    return events


def collect_items(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items that the events build, each in the order of its index."""
    items: list[dict[str, Any]] = []
    deltas: dict[str, str] = {}
    open_ids: set[str] = set()
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert not open_ids and event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            open_ids.add(event["item"]["id"])
        elif kind.endswith(".delta"):
            assert event["item_id"] in open_ids and event["output_index"] == len(items)
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
        elif kind.endswith(".done") and "item_id" in event and "part" not in event:
            [value] = [event[name] for name in ("text", "arguments", "input") if name in event]
            assert deltas.get(event["item_id"], "") == value
        elif kind == "response.output_item.done":
            open_ids.remove(event["item"]["id"])
            items.append(event["item"])
    assert not open_ids
    return items


def shape(items: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the type, the status and the texts of each item, without its ids."""
    shapes = []
    for item in items:
        texts = [part["text"] for part in item.get("content", ())]
        call = [item[name] for name in ("namespace", "name", "arguments", "input") if name in item]
        shapes.append((item["type"], item["status"], *texts, *call))
    return shapes
