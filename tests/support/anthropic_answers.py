"""Responses and events of the Messages API, validated by the types of the ``anthropic`` package."""

import json
from typing import Any

import pydantic
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent

_EVENTS: tuple[pydantic.TypeAdapter[Any], ...] = (
    pydantic.TypeAdapter(RawMessageStreamEvent),
    pydantic.TypeAdapter(BetaRawMessageStreamEvent),
)


def check_message(body: bytes | str) -> Message:
    """Return a response, which both the stable and the beta type must describe completely."""
    for kind in (BetaMessage, Message):
        message = kind.model_validate_json(body, strict=True)
        assert_described(message)
    assert isinstance(message, Message)
    return message


def check_stream(data: bytes) -> list[Any]:
    """Return the events of a stream. Each one's name is its type, and both types must describe it completely."""
    *parts, rest = data.decode().split("\n\n")
    assert rest == ""
    events = []
    for part in parts:
        name, _, payload = part.partition("\n")
        payload = payload.removeprefix("data: ")
        assert name == f"event: {json.loads(payload)['type']}"
        for adapter in _EVENTS:
            event = adapter.validate_json(payload, strict=True)
            assert_described(event)
        events.append(adapter.validate_json(payload))
    return events


def assert_described(value: Any) -> None:
    """Fail if a model inside ``value`` has a field that its type does not declare."""
    if isinstance(value, pydantic.BaseModel):
        assert not value.model_extra, (type(value), value.model_extra)
        for name in type(value).model_fields:
            assert_described(getattr(value, name))
    elif isinstance(value, list):
        for each in value:
            assert_described(each)


def join_events(events: list[Any]) -> dict[str, Any]:
    """Return the message that a client assembles from the events of a stream, as plain JSON values.

    Fails unless the events come in the order that Anthropic's specification prescribes.
    """
    start, *middle, delta, stop = events
    assert (start.type, delta.type, stop.type) == ("message_start", "message_delta", "message_stop")
    message = start.message.model_dump(exclude_unset=True)
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], None, 0)
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in middle:
        match event.type:
            case "content_block_start":
                assert not is_open and event.index == len(blocks)
                is_open = True
                blocks.append(event.content_block.model_dump(exclude_unset=True))
                if event.content_block.type == "tool_use":
                    blocks[-1]["input"] = ""
            case "content_block_delta":
                assert is_open and event.index == len(blocks) - 1
                field = {"input_json_delta": "partial_json"}.get(event.delta.type) or event.delta.type[:-6]
                target = "input" if field == "partial_json" else field
                blocks[-1][target] += getattr(event.delta, field)
            case "content_block_stop":
                assert is_open and event.index == len(blocks) - 1
                is_open = False
    assert not is_open
    for block in blocks:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"] or "{}")
    return {
        **message,
        "content": blocks,
        **delta.delta.model_dump(exclude_unset=True),
        "usage": delta.usage.model_dump(exclude_unset=True),
    }
